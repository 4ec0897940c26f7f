"""Ragged prefill attention: which library is taken, and the FlashInfer adapter.

FlashInfer needs a GPU. Its adapter is tested here against a stand-in with the same signature that
computes in PyTorch; ``test_flashinfer_equals_the_reference`` runs the real one where there is one.
"""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from oscar_sglang.config import OscarError
from oscar_sglang.kernels.reference import attend
from oscar_sglang.pool import flashinfer_varlen, varlen

Q, K = [3, 1, 5, 2], [3, 0, 9, 40]


class Wrapper:
    """FlashInfer's BatchPrefillWithRaggedKVCacheWrapper, as far as it is used."""

    planned = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert (kv_layout, backend) == (
            "NHD",
            "fa2",
        ) and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        *,
        causal=False,
        sm_scale=None,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and not qo_indptr.is_cuda
        Wrapper.planned += 1
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type
        self.args = qo_indptr.tolist(), kv_indptr.tolist(), sm_scale, logits_soft_cap, causal

    def run(self, q, k, v, *, out=None, return_lse=False):
        assert return_lse and all(x.is_contiguous() for x in (q, k, v))
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2], q.dtype, k.dtype)
        qs, ks, scale, cap, causal = self.args
        assert qs[-1] == len(q) and ks[-1] == len(k)
        lse = torch.full(q.shape[:2], float("nan"))  # of requests without keys
        for i in range(len(qs) - 1):
            rows, keys = slice(qs[i], qs[i + 1]), slice(ks[i], ks[i + 1])
            if keys.start < keys.stop:
                part = attend(q[rows], k[keys], v[keys], scale, cap, causal)
                out[rows], lse[rows] = part.out.to(q.dtype), part.lse / math.log(2)
        return out, lse


@pytest.fixture
def flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_varlen, "_FLOAT_BYTES", 1024)
    Wrapper.planned = 0
    return flashinfer_varlen.FlashInferAttention(torch.device("cpu"))


def indptr(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def inputs(queries, keys, device="cpu", dtype=torch.float32, dim=64):
    g = torch.Generator().manual_seed(0)
    shapes = (sum(queries), 4, dim), (sum(keys), 2, dim), (sum(keys), 2, dim)
    return [torch.randn(s, generator=g).to(device, dtype) for s in shapes]


def check(attention, q, k, v, queries, keys, atol, **options):
    args = dict(cu_q=indptr(queries, q.device), cu_k=indptr(keys, q.device), scale=0.2)
    args |= dict(max_q=max(queries), max_k=max(keys), **options)
    out, want = torch.full_like(q, 7.0), torch.empty_like(q)
    lse = attention(q, k, v, out, **args)
    want_lse = varlen.torch_attention(q, k, v, want, **args)
    torch.testing.assert_close(out, want, atol=atol, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=atol, rtol=0)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_adapter_keeps_the_contract(flashinfer, cap):
    """Out and natural-log LSE, also where a request has no keys; 1e-5 for the change of base."""
    check(flashinfer, *inputs(Q, K), Q, K, 1e-5, causal=False, logit_cap=cap)
    check(flashinfer, *inputs(Q, Q), Q, Q, 1e-5, causal=True, logit_cap=cap)


def test_adapter_takes_strided_rows(flashinfer):
    """Rows of a joint qkv projection: whatever FlashInfer reads must be contiguous."""
    wide = torch.randn(sum(Q), 8, 64)
    check(flashinfer, *wide.split([4, 2, 2], 1), Q, Q, 1e-5, causal=True, logit_cap=0.0)


def test_an_extend_is_planned_once_for_all_layers(flashinfer):
    def extend(layers, tiles):
        shapes = [(indptr(Q), indptr([k + i for k in K])) for i in range(tiles)]
        for _ in range(layers):
            for i, (cu_q, cu_k) in enumerate(shapes):
                q, k, v = inputs(Q, [n + i for n in K])
                args = dict(max_q=5, max_k=40 + i, causal=False, scale=0.2, logit_cap=0.0)
                flashinfer(q, k, v, torch.empty_like(q), cu_q=cu_q, cu_k=cu_k, **args)

    extend(6, 3)
    assert Wrapper.planned == 3
    extend(2, 3)  # the next extend has index tensors of its own
    assert Wrapper.planned == 6 and len(flashinfer.plans) == 4
    extend(2, 6)  # more tiles than plans: right, but planned again in every layer
    assert Wrapper.planned == 18


@pytest.fixture(params=[True, False], ids=["fa3", "no_fa3"])
def fa3(request, monkeypatch):
    """Whether SGLang's kernels bring FlashAttention-3."""
    package = types.ModuleType("sgl_kernel")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    module = types.ModuleType("sgl_kernel.flash_attn") if request.param else None
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    return request.param


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_choice_of_library(monkeypatch, flashinfer, capability, fa3):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(flashinfer_varlen, "installed", lambda: True)
    device, runs_fa3 = torch.device("cuda"), fa3 and 8 <= capability[0] <= 9
    sm = f"sm_{capability[0]}{capability[1]}"
    assert varlen.choose_library(None, device) == ("fa3" if runs_fa3 else "flashinfer")
    assert varlen.choose_library("flashinfer", device) == "flashinfer"
    if runs_fa3:
        assert varlen.choose_library("fa3", device) == "fa3"
    else:
        with pytest.raises(OscarError, match=f"{sm}.*drop --oscar-prefill-attention fa3"):
            varlen.choose_library("fa3", device)
    monkeypatch.setattr(flashinfer_varlen, "installed", lambda: False)
    for asked in ("flashinfer", *([] if runs_fa3 else [None])):
        with pytest.raises(OscarError, match=f"{sm}.*pip install flashinfer-python"):
            varlen.choose_library(asked, device)


def test_other_devices_than_gpus():
    assert varlen.choose_library(None, torch.device("cpu")) is None
    with pytest.raises(OscarError, match="drop --oscar-prefill-attention fa3"):
        varlen.choose_library("fa3", torch.device("cpu"))
    with pytest.raises(OscarError, match="not on xpu; drop --kv-cache-dtype int2"):
        varlen.choose_library(None, torch.device("xpu"))


def test_a_library_and_its_memory(monkeypatch):
    monkeypatch.setattr(flashinfer_varlen, "FlashInferAttention", lambda _device: "flashinfer")
    device = torch.device("cuda")
    assert varlen.varlen_attention("fa3", device) is varlen.flash_attention_3
    assert varlen.varlen_attention("flashinfer", device) == "flashinfer"
    assert varlen.varlen_attention(None, torch.device("cpu")) is varlen.torch_attention
    assert varlen.workspace_bytes("fa3") == 0 < varlen.workspace_bytes("flashinfer")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_flashinfer_equals_the_reference(dim, cap):
    """BF16 operands on a GPU: 2e-2 on outputs of order 1 and on the LSE."""
    if not torch.cuda.is_available():
        pytest.skip("FlashInfer needs a GPU")
    pytest.importorskip("flashinfer", reason="the package flashinfer-python is not installed")
    device = torch.device("cuda")
    attention = flashinfer_varlen.FlashInferAttention(device)
    long = ([130, 1, 64], [300, 0, 5000])
    for queries, keys, causal in ((Q, K, False), (Q, Q, True), (*long, False)):
        q, k, v = inputs(queries, keys, device, torch.bfloat16, dim)
        check(attention, q, k, v, queries, keys, 2e-2, causal=causal, logit_cap=cap)
