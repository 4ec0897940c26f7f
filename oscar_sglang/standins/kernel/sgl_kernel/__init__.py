"""Stand-in for ``sgl_kernel`` on machines without a GPU: there is no CPU wheel of it.

SGLang's CPU engine calls only the functions below for text models; any other use fails with a
message instead of computing something else.
"""

import torch

__version__ = "0.4.5"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, _len):
    """Write consecutive slots of ``out_cache_loc`` to positions [start, end) of each request."""
    taken = 0
    for row, first, last in zip(
        req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True
    ):
        count = last - first
        slots = out_cache_loc[taken : taken + count]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} needs a GPU: this is the CPU stand-in of oscar_sglang"
        )

    return missing


# What SGLang's models take from torch's registry while they are imported: the processor of every
# Qwen model with pictures imports those of Qwen3.5.
for _name in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
