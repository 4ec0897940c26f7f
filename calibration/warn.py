"""What an operator should know before trusting a calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .data import Tokens
from .fit import LayerFit, mean_energy
from .stats import Moments

ENOUGH_TOKENS = 2048
FEW_TOKENS = 512
_LISTED = 8
MEAN_DOMINANT = 0.25
HEADS_ALIKE = 0.5
OUTLIER_SHARE = 0.75
OUTLIER_SHARE_BIASED = 0.35  # seen in healthy models without biases, so only told with them
# Root mean square error of a logit, nats: 0.1 .. 0.75 in models whose KL is below 0.02; 2 in one
# whose KL (1.0) nears that of other positions (1.6).
LOGIT_WEAK, LOGIT_UNFIT = 1.0, 1.5
UNFIT = "not fit for 2 bits with this codec"


def calibration_warnings(
    source: Tokens, asked: int, moments: Sequence[Moments], fits: Sequence[LayerFit], biased: bool
) -> list[str]:
    """One line a finding. ``biased``: the model has biases in its Q or K projections."""
    return [
        *_about_tokens(source, asked),
        *_about_logits(fits),
        *_about_values(fits),
        *_about_means(moments),
        *_about_heads(moments),
        *_about_outliers(moments, biased),
        *_about_rope(moments, fits),
    ]


def _about_tokens(source: Tokens, asked: int) -> list[str]:
    found = []
    if source.count < asked:
        found.append(f"{source.description} holds {source.count} tokens, asked for {asked}")
    if source.count < FEW_TOKENS:
        found.append(
            f"only {source.count} tokens: fewer than {FEW_TOKENS} are not enough for a stable "
            f"metric; at least {ENOUGH_TOKENS} are recommended"
        )
    elif source.count < ENOUGH_TOKENS:
        found.append(f"only {source.count} tokens: at least {ENOUGH_TOKENS} are recommended")
    return found


def _about_logits(fits: Sequence[LayerFit]) -> list[str]:
    """Errors as attention feels them: K's own energy, which a bias may hold, says nothing."""
    worst = [max(fit.report.get("logit_error", [0.0])) for fit in fits]
    weak = [i for i, error in enumerate(worst) if error >= LOGIT_WEAK]
    if not weak:
        return []
    most = max(worst)
    about = f"logits are off by up to {most:.2g} nats, 1 or more in {_layers(weak)} of {len(fits)}"
    if most >= LOGIT_UNFIT:
        return [f"this model is {UNFIT}: {about}; try another codec, more bits, or do without int2"]
    return [f"{about}: check with oscar-sglang eval before you serve this model in 2 bits"]


def _about_values(fits: Sequence[LayerFit]) -> list[str]:
    worst = ((i, max(fit.report["v_error"])) for i, fit in enumerate(fits))
    return [
        f"layer {i}: V keeps less than half of its energy (error {error})"
        for i, error in worst
        if error > 0.5
    ]


def _about_means(moments: Sequence[Moments]) -> list[str]:
    weak = {i: int((mean_energy(m) < MEAN_DOMINANT).sum()) for i, m in enumerate(moments)}
    count, total = sum(weak.values()), sum(len(m.k_mean) for m in moments)
    if not count:
        return []
    return [
        f"K's mean holds less than {MEAN_DOMINANT:.0%} of its energy in {count} of {total} heads "
        f"({_layers([i for i, n in weak.items() if n])}): aligning it gives them little, their "
        "basis is chosen by measured error"
    ]


def head_similarity(qtq: torch.Tensor) -> float:
    """Smallest cosine between two heads' E[q^T q] [Hk, D, D], isotropic part removed."""
    if len(qtq) < 2:
        return 1.0
    eye = torch.eye(qtq.shape[-1], dtype=qtq.dtype)
    trace = qtq.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    flat = (qtq - trace * eye).flatten(1)
    flat = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return float((flat @ flat.mT).min())


def _about_heads(moments: Sequence[Moments]) -> list[str]:
    apart = [i for i, m in enumerate(moments) if head_similarity(m.qtq) < HEADS_ALIKE]
    if not apart:
        return []
    return [
        f"KV heads disagree in {len(apart)} of {len(moments)} layers ({_layers(apart)}): each has "
        "its own rotation here; files with one rotation a layer lose quality on this model"
    ]


def _about_outliers(moments: Sequence[Moments], biased: bool) -> list[str]:
    """Channels of K whose mean alone is a large part of the head's energy; before RoPE, if that is
    known: after it the mean of a channel that turns fast is gone, and its energy is not."""
    share = OUTLIER_SHARE_BIASED if biased else OUTLIER_SHARE
    layers = []
    for i, m in enumerate(m.before or m for m in moments):
        total = m.ktk.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).clamp_min(1e-30)
        if bool((m.k_mean.square() / total > share).any()):
            layers.append(i)
    if not layers:
        return []
    cause = "the biases of its Q and K projections" if biased else "no bias explains it"
    return [
        f"single K channels hold over {share:.0%} of a head's energy in "
        f"{len(layers)} layers ({_layers(layers)}; {cause}): check with oscar-sglang eval"
    ]


def _about_rope(moments: Sequence[Moments], fits: Sequence[LayerFit]) -> list[str]:
    """Only a codec that follows the turn suffers where it is not known."""
    before, spec = moments[0].before, fits[0].spec
    if before is None or before.doubt is None or spec is None or spec.fit != "before_rope":
        return []
    return [
        f"{before.doubt}: K is coded about a mean that does not turn with the position, and error "
        "grows with the context; calibrate on sequences as long as those that are served"
    ]


def _layers(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_LISTED]))
    more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
    return f"layer{'s' * (len(ids) > 1)} {shown}{more}"
