"""Calibration tokens from the model itself: random ids, made plausible. Needs no data.

Uniform random ids make queries that no text makes, and a feedback metric fitted to them is worse
(see scripts/results). So every id is replaced by a sample of what the model expects after the ids
before it, all positions at once from one exact pass, and the first half of each sequence is said
again in the second, which sets the heads that look things up to work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .collect import body
from .data import Tokens

_ROWS = 256  # logits held at a time


def plausible(model: PreTrainedModel, tokens: Tokens, progress=None) -> Tokens:
    """``tokens``, with random ids replaced by ids that the model itself expects."""
    if tokens.seed is None:
        return tokens
    sequences = resample(model, tokens.sequences, tokens.seed, progress)
    return Tokens(sequences, f"sampled from the model, seed {tokens.seed}")


@torch.no_grad()
def resample(
    model: PreTrainedModel,
    sequences: list[torch.Tensor],
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[torch.Tensor]:
    """Sequences of the same lengths as ``sequences`` ([T] int64 each), first ids kept."""
    generator = torch.Generator().manual_seed(seed)
    total, done, found = sum(map(len, sequences)), 0, []
    for ids in sequences:
        half = ids[: (len(ids) + 1) // 2]
        hidden = body(model)(input_ids=half[None].to(model.device), use_cache=False)[0][0]
        nexts = [
            _sample(model.get_output_embeddings()(rows).float(), generator)
            for rows in hidden[:-1].split(_ROWS)
        ]
        half = torch.cat([half[:1], *nexts])
        found.append(torch.cat([half, half])[: len(ids)])
        done += len(ids)
        if progress:
            progress("choosing tokens", done, total)
    return found


def _sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One id per row of logits [n, vocab], drawn on the CPU so that devices agree."""
    return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0]
