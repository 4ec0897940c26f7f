"""Gated DeltaNet layers on a CPU, for tests: SGLang has them for GPUs and Intel servers only.

The delta rule is transformers' own, of its Qwen3-Next.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.nn.functional as F


def _runs(query_start_loc, cache_indices):
    starts = query_start_loc.tolist()
    return zip(starts, starts[1:], cache_indices.tolist(), strict=False)


def _convolve(x, state, weight, bias, activation):
    """Depthwise causal convolution of x [B, C, T] after state [B, C, width - 1], which becomes the
    last inputs; then SiLU, if asked for."""
    seen = torch.cat([state, x], dim=-1).to(weight.dtype)
    state.copy_(seen[..., -state.shape[-1] :])
    out = F.conv1d(seen, weight[:, None], bias, groups=len(weight))
    out = out[..., -x.shape[-1] :]
    return (F.silu(out) if activation else out).to(x.dtype)


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    *,
    conv_states,
    query_start_loc,
    cache_indices,
    has_initial_state,
    activation="silu",
    **_,
):
    """x [channels, T], sequences one after the other; states [slots, channels, width - 1]."""
    out = torch.empty_like(x)
    for i, (start, end, slot) in enumerate(_runs(query_start_loc, cache_indices)):
        if not has_initial_state[i]:
            conv_states[slot] = 0
        state = conv_states[slot : slot + 1]
        rows = x[None, :, start:end]
        out[:, start:end] = _convolve(rows, state, weight, bias, activation)[0]
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation=None, *, conv_state_indices):
    state = conv_states[conv_state_indices]
    out = _convolve(x[..., None], state, weight, bias, activation)[..., 0]
    conv_states[conv_state_indices] = state
    return out


def _gating(a_log, a, b, dt_bias):
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    return g[None], b.sigmoid()[None]


def _delta_rule(q, k, v, g, beta, states, indices, query_start_loc):
    """[1, T, heads, dim] each; states [slots, value heads, V, K] are gone on from and updated."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    out = torch.empty_like(v)
    for start, end, slot in _runs(query_start_loc, indices):
        rows = (x[:, start:end] for x in (q, k, v, g, beta))
        before = states[slot : slot + 1].mT
        out[:, start:end], after = torch_recurrent_gated_delta_rule(
            *rows, before, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        states[slot] = after[0].mT.to(states.dtype)
    return out


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, *, initial_state, initial_state_indices, cu_seqlens, **_
):
    out = _delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **_
):
    g, beta = _gating(A_log, a, b, dt_bias)
    states = initial_state_source, initial_state_indices
    return _delta_rule(q, k, v, g, beta, *states, cu_seqlens)


def _sigmoid_mul(x, gate, inplace=False):
    return x.mul_(gate.reshape(x.shape).sigmoid())


def _missing(*_args):
    raise NotImplementedError("a kernel that these tests do not reach has no CPU stand-in")


def _qk_norm_with_gate(q_gate, k, q_weight, k_weight, eps, head_dim, heads):
    """q_gate [T, heads * 2 * head_dim], a head's gate after its query -> rows of heads."""
    q, gate = q_gate.reshape(-1, heads, 2, head_dim).unbind(2)

    def norm(x, weight):
        x = x.reshape(-1, head_dim)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)

    return norm(q, q_weight), norm(k, k_weight), gate.reshape(-1, head_dim)


def _split_projections(qkvz, ba, k_heads, v_heads, k_dim, v_dim):
    """Rows of q, k, v, z and of b, a -> q, k, v together; z by head; b; a."""
    values = v_heads * v_dim
    mixed, z = qkvz.split([qkvz.shape[1] - values, values], dim=1)
    b, a = ba.split([v_heads, v_heads], dim=1)
    return mixed, z.reshape(-1, v_heads, v_dim), b, a


def install() -> None:
    """Before SGLang imports its hybrid models."""
    module = types.ModuleType("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(module, function.__name__, function)
    sys.modules["sgl_kernel.mamba"] = module
    ops = torch.ops.sgl_kernel
    ops.fused_gdn_gating_cpu = _gating
    ops.fused_sigmoid_gating_delta_rule_update_cpu = fused_sigmoid_gating_delta_rule_update_cpu
    ops.fused_sigmoid_mul_cpu = _sigmoid_mul  # from here on for Qwen3.5
    ops.fused_qk_gemma_rmsnorm_cpu = _missing
    ops.fused_qk_gemma_rmsnorm_with_gate_cpu = _qk_norm_with_gate
    ops.fused_qkvzba_split_reshape_cat_contiguous_cpu = _split_projections

    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated

    fused_norm_gate.layer_norm_gated_fwd = _norm_gated
    layernorm_gated._layer_norm_fwd = _norm_gated_of_qwen3_5
    from sglang.srt.models import qwen2_moe  # the layers beside them; not the hybrid models yet

    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated


def _add_gated(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
    gate = (hidden_states @ gate_weight).sigmoid()
    final_hidden_states += gate[:, None] * shared_output


def _norm_gated_of_qwen3_5(x, weight, bias, eps, *, z, activation, is_rms_norm, **_):
    options = dict(activation=activation, eps=eps, residual=None, is_rms_norm=is_rms_norm)
    return _norm_gated(x, z, weight, bias, **options)[:3]


def _norm_gated(x, g, weight, bias, *, activation, eps, residual, is_rms_norm, **_):
    assert bias is None and residual is None and is_rms_norm
    assert activation in ("silu", "swish")
    normal = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return (normal * F.silu(g.float())).to(x.dtype), None, None, None
