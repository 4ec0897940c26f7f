"""What the kernels of codec ``position`` read besides the artifact's tensors, made from these.

    turns    [tiles, D] f16   ``Rope.table``, columns by the model's channels: of a pair of channels
                              the first has the cosine, the second the sine
    lift     [Hk, D, D] f16   w A = (turns[tile] @ lift^T) * unit (``codec_position.lift_of``)
    mix      [Hk, 2, D] f32   k . w = turns[tile] . C(k),
    partner  [D] i32          C(k)[c] = mix[0, c] k[c] + mix[1, c] k[partner[c]]
    units    [Hk, 2] f32      1 / |m|^2 (0 where m is 0), unit
    metric   [Hk, D, D] f16   G over a power of two; a gain is a quotient of its products

Matrices are transposed, so that what a thread multiplies lies together. A query's product with w
is ``turns[tile] . C(q)``, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .codec_position import TILE, lift_of


class LayerMeans(NamedTuple):
    """Of one layer; see the module docstring."""

    turns: torch.Tensor
    lift: torch.Tensor
    mix: torch.Tensor
    partner: torch.Tensor
    units: torch.Tensor
    metric: torch.Tensor


class Means(NamedTuple):
    """Of all layers, stacked, so that one kernel can reach them.

    tables  [ropes, tiles, D] f16   ``turns`` of each RoPE     which  [L] i32  the one of a layer
    and ``LayerMeans``' other tensors with a leading L
    """

    tables: torch.Tensor
    which: torch.Tensor
    lift: torch.Tensor
    mix: torch.Tensor
    partner: torch.Tensor
    units: torch.Tensor
    metric: torch.Tensor

    @classmethod
    def of(cls, specs: Sequence, params: Sequence, context: int) -> Means:
        """For requests of up to ``context`` tokens, from each layer's ``CodecSpec`` and
        ``LayerParams``. Raises ValueError without a context."""
        if context < 1:
            raise ValueError("codec position needs to know how long a context may be")
        of_layers = [spec.meta.rope for spec in specs]
        ropes = list(dict.fromkeys(of_layers))
        tiles, device = -(-context // TILE), params[0].mean.device
        tables = torch.stack([r.table(tiles)[:, _places(r.pairs)] for r in ropes])
        which = torch.tensor([ropes.index(rope) for rope in of_layers], dtype=torch.int32)
        layers = [_tensors(rope, p) for rope, p in zip(of_layers, params, strict=True)]
        stacked = (torch.stack(some).contiguous() for some in zip(*layers, strict=True))
        return cls(tables.to(device), which.to(device), *stacked)

    def layer(self, i: int) -> LayerMeans:
        return LayerMeans(self.tables[int(self.which[i])], *(x[i] for x in self[2:]))


def _places(pairs: Sequence[int]) -> torch.Tensor:
    """Where ``codec_position``'s order of channels has each of the model's."""
    return torch.tensor(pairs).argsort()


def _tensors(rope, p) -> tuple[torch.Tensor, ...]:
    """lift, mix, partner, units and metric of a layer."""
    device, order, places = p.mean.device, torch.tensor(rope.pairs), _places(rope.pairs)
    lift, unit = lift_of(rope, p.mean, p.r_k)
    first, second = p.mean[:, order.to(device)].chunk(2, -1)
    own, other = torch.cat([first, first], -1), torch.cat([second, -second], -1)
    power = p.mean.double().square().sum(-1)
    inverse = torch.where(power > 0, 1 / power, 0.0).float()
    largest = p.metric.abs().amax((1, 2), keepdim=True)
    places = places.to(device)
    return (
        lift[:, places].transpose(1, 2),
        torch.stack([own, other], 1)[..., places],
        order.roll(-(len(order) // 2)).int().to(device)[places],
        torch.stack([inverse, unit.to(device)], -1),
        torch.ldexp(p.metric, 14 - torch.frexp(largest).exponent).half(),
    )
