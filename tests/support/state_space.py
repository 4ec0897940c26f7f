"""Mamba-2 and short-convolution layers on a CPU, for tests: SGLang has them for GPUs only.

Written from the recurrence itself, a token at a time: h = exp(dt A) h + dt B x, y = C h + D x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .gated_delta_net import causal_conv1d_fn_cpu, causal_conv1d_update_cpu


def _step(state, x, dt, a, b, c, d):
    """state [B, H, P, N], gone on from in place; x [B, H, P]; dt [B, H], after softplus; a, d [H];
    b, c [B, G, N], shared by the heads of a group -> [B, H, P]."""
    b, c = (v.repeat_interleave(x.shape[1] // v.shape[1], dim=1) for v in (b, c))
    kept = (dt * a).exp()[..., None, None] * state
    state.copy_(kept + (dt[..., None] * x)[..., None] * b[:, :, None])
    return (state * c[:, :, None]).sum(-1) + d[:, None] * x


def chunk_scan(
    x, dt, a, b, c, *, D, dt_bias, cu_seqlens, initial_states, out, state_dtype, **_
):  # fmt: skip
    """x [1, T, H, P]: sequences one after the other -> (None, a state of each sequence, None)."""
    starts = cu_seqlens.tolist()
    states = torch.zeros(len(starts) - 1, *x.shape[2:], b.shape[-1])
    if initial_states is not None:
        states.copy_(initial_states)
    dt = F.softplus(dt.float() + dt_bias.float())
    for i, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        for t in range(start, end):
            row = (v[:, t].float() for v in (b, c))
            y = _step(states[i : i + 1], x[:, t].float(), dt[:, t], a.float(), *row, D.float())
            out[:, t] = y.to(out.dtype)
    return None, states.to(state_dtype), None


def state_update(
    state, x, dt, a, b, c, d, *, z, dt_bias, dt_softplus, state_batch_indices, out
):  # fmt: skip
    """A token of each request. SGLang spreads dt, a and d over channels, and states over slots."""
    assert z is None and dt_softplus
    rows = state[state_batch_indices].float()
    step = F.softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    y = _step(rows, x.float(), step, a[:, 0, 0], b.float(), c.float(), d[:, 0].float())
    state[state_batch_indices] = rows.to(state.dtype)
    out.copy_(y)


def install() -> None:
    """Before SGLang imports its models with such layers."""
    from sglang.srt.layers.attention.mamba import causal_conv1d, mamba

    for module in (causal_conv1d, mamba):
        module.causal_conv1d_fn = module.causal_conv1d_fn_triton = causal_conv1d_fn_cpu
        module.causal_conv1d_update = causal_conv1d_update_cpu
        module.causal_conv1d_update_triton = causal_conv1d_update_cpu
    mamba.mamba_chunk_scan_combined = chunk_scan
    mamba.selective_state_update = state_update
