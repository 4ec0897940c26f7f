"""Ragged prefill attention with LSE from the libraries SGLang brings."""

from __future__ import annotations

from typing import Protocol

import torch

from ..config import OscarError, flag


class Varlen(Protocol):
    """softmax(q k^T * scale) v per request, requests back to back.

    q [T, H, D], k and v [S, Hk, D] (any token stride), cu_q and cu_k [B+1] int32. Fills out
    [T, H, D], contiguous in q's dtype; returns lse [T, H] float32 (natural log; any strides; -inf
    where a request has no keys).
    """

    def __call__(
        self, q, k, v, out, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap
    ) -> torch.Tensor: ...


def flash_attention_3(q, k, v, out, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap):
    from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func

    _, lse, *_ = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=causal,
        softcap=logit_cap or 0.0,
        num_splits=0,  # the library splits long keys by itself
        return_softmax_lse=True,
        out=out,
    )
    return lse.transpose(0, 1)


def torch_attention(q, k, v, out, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap):
    """The same on any device, from the reference; for tests of the GPU path without a GPU."""
    from ..kernels.reference import attend

    out.zero_()
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in bounds:
        part = attend(q[q0:q1], k[k0:k1], v[k0:k1], scale, logit_cap, causal)
        out[q0:q1], lse[q0:q1] = part.out.to(q.dtype), part.lse
    return lse


def _has_flash_attention_3(device: torch.device) -> bool:
    if not 8 <= torch.cuda.get_device_capability(device)[0] <= 9:
        return False
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ImportError:
        return False
    return True


def choose_library(asked: str | None, device: torch.device) -> str | None:
    """``asked``, of config.PREFILL_ATTENTION, or the best that this GPU has; None on a CPU.

    OscarError where the device does not have it, or is of another kind.
    """
    from . import flashinfer_varlen

    if device.type == "cpu" and asked is None:
        return None
    if device.type == "cpu":
        raise OscarError(
            f"a CPU has one prefill attention; drop {flag('prefill_attention')} {asked}"
        )
    if device.type != "cuda":
        raise OscarError(
            f"int2 runs on CUDA GPUs and CPUs, not on {device.type}; drop --kv-cache-dtype int2"
        )
    has_fa3 = _has_flash_attention_3(device)
    library = asked or ("fa3" if has_fa3 else "flashinfer")
    major, minor = torch.cuda.get_device_capability(device)
    if library == "fa3" and not has_fa3:
        raise OscarError(
            f"FlashAttention-3 does not run here: it needs sm_80 to sm_90 (this GPU is sm_{major}"
            f"{minor}) and the package sglang-kernel; drop {flag('prefill_attention')} fa3"
        )
    if library == "flashinfer" and not flashinfer_varlen.installed():
        raise OscarError(
            "int2 prefill needs FlashAttention-3 (sglang-kernel, sm_80 to sm_90) or FlashInfer; "
            f"this GPU is sm_{major}{minor} and the package flashinfer is missing: pip install "
            "flashinfer-python"
        )
    return library


def workspace_bytes(library: str | None) -> int:
    """Device memory that ``varlen_attention`` keeps; part of the memory budget."""
    from .flashinfer_varlen import WORKSPACE_BYTES

    return WORKSPACE_BYTES if library == "flashinfer" else 0


def varlen_attention(library: str | None, device: torch.device) -> Varlen:
    """Of a library that ``choose_library`` gave; on a CPU, which has none, the reference."""
    from .flashinfer_varlen import FlashInferAttention

    if device.type == "cpu":
        return torch_attention
    return FlashInferAttention(device) if library == "flashinfer" else flash_attention_3
