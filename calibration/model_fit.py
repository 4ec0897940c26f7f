"""A codec fitted to every layer of a model; of ``position`` the widths, which all layers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..kernels.codec import LayerCodec
from .collect import Progress
from .errors import CalibrationError
from .fit import LayerFit, fit_layer, widened
from .stats import Moments
from .widths import EXTRA_BITS, Scores, base_bits, choose, wide_slots


@dataclasses.dataclass
class Fitter:
    """Fits ``codec`` to every layer. Called by an engine, it keeps what it found."""

    codec: str
    context: int
    n_sink: int
    progress: Progress | None = None

    def __call__(self, moments: list[Moments]) -> list[LayerCodec]:
        return [fit.codec for fit in self.fit(moments)]

    def fit(self, moments: list[Moments]) -> list[LayerFit]:
        fits = []
        for m in moments:
            fits.append(fit_layer(m, self.codec, context=self.context, n_sink=self.n_sink))
            if self.progress:
                self.progress("fitting", len(fits), len(moments))
        return fits


def wanted_bits(bits: float | None, head_dim: int) -> float:
    """Bits per element for codec ``position``. Raises CalibrationError for what no choice of widths
    gives."""
    least = base_bits(head_dim)
    if bits is None:
        return least + EXTRA_BITS
    if not least <= bits <= least + 2:
        raise CalibrationError(
            f"{bits} bits per element cannot be had: with head_dim {head_dim} K and V of 2 or 4 "
            f"bits take {least} to {least + 2}"
        )
    return bits


def widen(
    fits: list[LayerFit],
    moments: Sequence[Moments],
    scores: Scores | None,
    bits: float,
    context: int,
    n_sink: int,
) -> tuple[list[LayerFit], list[str]]:
    """``fits`` with the widths that ``bits`` pay for, and what there is to say about it."""
    layers, d = len(fits), fits[0].params.mean.shape[-1]
    slots = wide_slots(bits, layers, d)
    if scores is None and 0 < slots < 2 * layers:
        found = "the sequences are too short, or the model's output projections were not found"
        return fits, [f"no K or V was given 4 bits, as their effect could not be judged: {found}"]
    widths = [(4, 4)] * layers if slots == 2 * layers else [(2, 2)] * layers
    if scores is not None:
        widths = choose(scores, bits, d)
    wide = [
        widened(fit, m, pair, context, n_sink)
        for fit, m, pair in zip(fits, moments, widths, strict=True)
    ]
    for fit, pair in zip(wide, scores or (), strict=scores is not None):
        fit.report["score"] = [float(f"{x:.4g}") for x in pair]
    return wide, []
