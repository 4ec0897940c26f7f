"""Ragged prefill attention through FlashInfer, where FlashAttention-3 is missing (sm_100 on)."""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from typing import Any

import torch

_FLOAT_BYTES = 128 << 20  # what FlashInfer recommends; partial results of split keys
_INT_BYTES = 8 << 20  # what each of its wrappers allocates for its schedule
# Plans kept: the fresh tokens and a few tiles of one extend. With more tiles each layer plans anew.
_PLANS = 4
WORKSPACE_BYTES = _FLOAT_BYTES + _PLANS * _INT_BYTES


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


class FlashInferAttention:
    """A ``varlen.Varlen``. A batch shape is planned when it is first seen, i.e. in the first layer
    of an extend: that waits for the device once, as FlashInfer schedules on the host."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self.plans: OrderedDict[tuple, _Plan] = OrderedDict()

    def __call__(self, q, k, v, out, *, cu_q, cu_k, max_q, max_k, causal, scale, logit_cap):
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        # Index tensors are made anew for every extend and never written again; a plan keeps its
        # own alive, so that their ids are not given to others.
        key = (id(cu_q), id(cu_k), causal, scale, logit_cap, heads, kv_heads, dim, q.dtype, k.dtype)
        plan = self.plans.pop(key, None)
        if plan is None:
            full = len(self.plans) == _PLANS
            wrapper = self.plans.popitem(last=False)[1].wrapper if full else self._wrapper()
            plan = _Plan(wrapper, cu_q, cu_k)
            plan.wrapper.plan(
                plan.host_q,
                plan.host_k,
                heads,
                kv_heads,
                dim,
                causal=causal,
                sm_scale=scale,
                logits_soft_cap=logit_cap or 0.0,
                q_data_type=q.dtype,
                kv_data_type=k.dtype,
            )
        self.plans[key] = plan  # most recently used last
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        _, lse = plan.wrapper.run(q, k, v, out=out, return_lse=True)
        if plan.empty is not None:  # requests without keys, whatever FlashInfer says of them
            out[plan.empty] = 0
            lse[plan.empty] = -torch.inf
        return lse.mul_(math.log(2))  # it counts in powers of two

    def _wrapper(self) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        # "fa2" runs on every GPU since sm_80 and is the form whose LSE is in powers of two.
        return BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa2")


class _Plan:
    """A wrapper with the schedule of one batch shape."""

    def __init__(self, wrapper: Any, cu_q: torch.Tensor, cu_k: torch.Tensor) -> None:
        self.wrapper, self.keep = wrapper, (cu_q, cu_k)
        self.host_q, self.host_k = torch.stack([cu_q, cu_k]).cpu()
        no_keys = self.host_k.diff() == 0
        self.empty = None  # [T] bool: queries of requests without keys
        if bool(no_keys.any()):
            rows = torch.repeat_interleave(no_keys, self.host_q.diff().long())
            self.empty = rows.to(cu_q.device)
