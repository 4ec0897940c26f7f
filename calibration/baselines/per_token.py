"""Min-max quantisation of each row on its own, with or without a Hadamard rotation."""

from __future__ import annotations

from ...kernels.hadamard import hadamard
from ..method import Side
from .bits import affine, affine_codes, affine_values, pack_bits, unpack_bits


class PerToken(Side):
    """``bits`` a number plus two FP16 a row and KV head; ``rotate`` applies H along head_dim
    (QuaRot, arXiv 2404.00456)."""

    def __init__(self, bits: int, rotate: bool) -> None:
        self.bits = bits
        self.rotate = rotate

    def encode(self, params, x, first):
        y = x @ hadamard(x.shape[-1]).float().to(x.device) if self.rotate else x
        meta = affine(*y.aminmax(dim=-1), self.bits)
        return pack_bits(affine_codes(y, meta[..., None, :], self.bits), self.bits), meta

    def decode(self, params, parts):
        packed, meta = parts
        y = affine_values(unpack_bits(packed), meta[..., None, :])
        return y @ hadamard(y.shape[-1]).float().to(y.device) if self.rotate else y
