"""Ragged prefill attention with LSE from the libraries SGLang brings."""

from __future__ import annotations

from typing import Protocol

import torch


class Varlen(Protocol):
    """softmax(q k^T * scale) v per request, requests back to back.

    q [T, H, D], k and v [S, Hk, D], cu_q and cu_k [B+1] int32 -> out [T, H, D] in q's dtype,
    lse [T, H] float32 (natural log; any strides).
    """

    def __call__(
        self, q, k, v, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def flash_attention_3(q, k, v, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap):
    from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func

    out, lse, *_ = flash_attn_varlen_func(
        q.contiguous(),
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=causal,
        softcap=logit_cap or 0.0,
        num_splits=0,
        return_softmax_lse=True,
    )
    return out, lse.transpose(0, 1)


def torch_attention(q, k, v, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap):
    """The same on any device, from the reference; for tests of the GPU path without a GPU."""
    from .kernels.reference import attend

    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in bounds:
        part = attend(q[q0:q1], k[k0:k1], v[k0:k1], scale, logit_cap, causal)
        out[q0:q1], lse[q0:q1] = part.out.to(q.dtype), part.lse
    return out, lse


def varlen_attention(device: torch.device) -> Varlen:
    """FlashAttention-3 where SGLang has it (sm_80 to sm_90)."""
    if device.type == "cpu":
        return torch_attention
    major, minor = torch.cuda.get_device_capability(device)
    if not 8 <= major <= 9:
        raise NotImplementedError(
            f"int2 prefill needs FlashAttention-3 (sm_80 to sm_90); this GPU is sm_{major}{minor}"
        )
    return flash_attention_3
