"""SGLang's ``--kv-cache-dtype fp8_e4m3`` without calibrated scales."""

from __future__ import annotations

import torch

from ..method import Side

_MAX = 448.0


class Fp8(Side):
    """One byte a number, no metadata."""

    def encode(self, params, x, first):
        return (x.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn),)

    def decode(self, params, parts):
        return parts[0].float()
