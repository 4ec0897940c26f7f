"""Keys quantised per channel over a block of tokens: KIVI (arXiv 2402.02750), and Kitty's
refinement of it with more bits for the most sensitive channels (arXiv 2511.18643)."""

from __future__ import annotations

import torch

from ..method import Side, block_pieces
from .bits import affine, affine_codes, affine_values, pack_bits, unpack_bits


class PerChannel(Side):
    """2 bits a number and two FP16 a channel and block of ``block`` tokens.

    ``boosted`` of the channels of each head get 4 bits (Kitty): those with the largest
    ``E[q_c^2] Var[k_c]``, chosen once at calibration. The published code chooses them per page,
    and so has to store the choice.
    """

    def __init__(self, block: int, boosted: float = 0.0) -> None:
        self.block = block
        self.boosted = boosted
        self.needs_stats = boosted > 0

    def fit(self, moments):
        """Channel order per head [Hk, D], most sensitive first (None without ``boosted``)."""
        if not self.boosted:
            return None
        power = moments.ktk.diagonal(dim1=-2, dim2=-1) - moments.k_mean.square()
        return (power * moments.qtq.diagonal(dim1=-2, dim2=-1)).argsort(-1, descending=True)

    def encode(self, params, x, first):
        """Three tensors per block: codes of the boosted and of the other channels, and meta."""
        parts = []
        for piece in block_pieces(first, len(x), self.block):
            parts += self._encode_block(params, x[piece])
        return tuple(parts)

    def _encode_block(self, order, x: torch.Tensor) -> list[torch.Tensor]:
        """x [n, Hk, D]."""
        if order is not None:
            x = x.gather(-1, order.to(x.device).expand_as(x))
        low, high = x.aminmax(dim=0)
        n = round(self.boosted * x.shape[-1])
        meta = torch.cat(
            [affine(low[..., :n], high[..., :n], 4), affine(low[..., n:], high[..., n:], 2)], -2
        )
        return [
            pack_bits(affine_codes(x[..., :n], meta[..., :n, :], 4), 4),
            pack_bits(affine_codes(x[..., n:], meta[..., n:, :], 2), 2),
            meta,
        ]

    def decode(self, params, parts):
        blocks = []
        for boosted, plain, meta in zip(*(parts[i::3] for i in range(3)), strict=True):
            codes = torch.cat([unpack_bits(boosted), unpack_bits(plain)], -1)
            blocks.append(affine_values(codes, meta))
        x = torch.cat(blocks)
        if params is None:
            return x
        return torch.empty_like(x).scatter_(-1, params.to(x.device).expand_as(x), x)
