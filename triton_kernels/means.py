"""What the kernels of codec ``position`` read besides the artifact's tensors; made once, from these.

    turns    per layer [tiles, D] f16   ``Rope.table``, columns by the model's channels: of a pair of
                                        channels the first has the cosine, the second the sine
    lift     [L, Hk, D, D] f16          w A = (turns[tile] @ lift^T) * unit (``codec_position.lift_of``)
    mix      [L, Hk, 2, D] f32          k . w = turns[tile] . C(k),
    partner  [L, D] i32                 C(k)[c] = mix[0, c] k[c] + mix[1, c] k[partner[c]]
    units    [L, Hk, 2] f32             1 / |m|^2 (0 where m is 0), unit
    metric   [L, Hk, D, D] f16          G, scaled by a power of two: a gain is a quotient of its products

Matrices are transposed, so that what a thread multiplies lies together. L layers, stacked, so that
one kernel reaches them all; layers of one RoPE share its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .codec_position import TILE, Rope, lift_of


class Means(NamedTuple):
    """See the module docstring."""

    turns: list[torch.Tensor]
    lift: torch.Tensor
    mix: torch.Tensor
    partner: torch.Tensor
    units: torch.Tensor
    metric: torch.Tensor

    @classmethod
    def of(cls, specs: Sequence, params: Sequence, context: int) -> Means:
        """For requests of up to ``context`` tokens; ``CodecSpec`` and ``LayerParams`` of each layer.
        Raises ValueError without a context."""
        if context < 1:
            raise ValueError("codec position needs to know how long a context may be")
        tables: dict[Rope, torch.Tensor] = {}
        layers = []
        for spec, p in zip(specs, params, strict=True):
            device, order = p.mean.device, torch.tensor(spec.rope.pairs)
            back, half = order.argsort(), len(order) // 2
            if spec.rope not in tables:
                table = spec.rope.table(-(-context // TILE))
                tables[spec.rope] = table[:, back].contiguous().to(device)
            lift, unit = lift_of(spec.rope, p.mean, p.r_k)
            first, second = p.mean[:, order.to(device)].chunk(2, -1)
            own = torch.cat([first, first], -1)[:, back.to(device)]
            other = torch.cat([second, -second], -1)[:, back.to(device)]
            power = p.mean.double().square().sum(-1)
            inverse = torch.where(power > 0, 1 / power, 0.0).float()
            layers.append(
                (
                    lift[:, back.to(device)].transpose(1, 2).contiguous(),
                    torch.stack([own, other], 1),
                    order.roll(-half)[back].int().to(device),
                    torch.stack([inverse, unit.to(device)], -1),
                    _in_half(p.metric),
                )
            )
        stacked = (torch.stack(some) for some in zip(*layers, strict=True))
        return cls([tables[spec.rope] for spec in specs], *stacked)

    def layer(self, i: int) -> Means:
        """Of layer ``i`` alone: without the leading L, ``turns`` a tensor."""
        return Means(self.turns[i], *(x[i] for x in self[1:]))


def floats_per_head(head_dim: int) -> int:
    """Float32 numbers that ``Means`` takes for a layer and KV head, tables apart; ``partner``, of
    the layer, is counted for each head."""
    return head_dim * head_dim + 3 * head_dim + 2


def _in_half(metric: torch.Tensor) -> torch.Tensor:
    """FP16 of metric [Hk, D, D] over a power of two that leaves the largest element near 2^13."""
    largest = metric.abs().amax((1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent - 14
    return torch.ldexp(metric, -exponent).half()
