"""KL(exact || int2 pool) by teacher-forced decoding inside SGLang's model runner.

The document but its last 129 tokens is prefilled (exactly, as any fresh prompt), the rest is fed
token by token, so that each step reads sink | history | recent from the real pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from scripts.lib.inprocess import Request, Runner

ROWS = 129


class Quality(NamedTuple):
    """Means over the last rows: KL in nats, top-1 agreement in [0, 1], NLL difference in nats."""

    kl: float
    top1: float
    dnll: float


@torch.no_grad()
def exact_logprobs(model, ids: list[int], rows: int = ROWS) -> torch.Tensor:
    """log-softmax of the last ``rows`` positions from transformers, [rows, vocab] float32."""
    logits = model(torch.tensor([ids]), logits_to_keep=rows).logits[0]
    return logits.float().log_softmax(-1)


def pool_logprobs(runner: Runner, row: int, ids: list[int], rows: int = ROWS) -> torch.Tensor:
    """The same positions, decoded through the pool."""
    request: Request = runner.request(row)
    runner.extend((request, ids[:-rows]))
    steps = [runner.decode((request, token)) for token in ids[-rows:]]
    return torch.cat(steps).log_softmax(-1)


def compare(exact: torch.Tensor, other: torch.Tensor, ids: list[int]) -> Quality:
    """``ids``: the document; rows predict the token after them, the last one has none."""
    kl = (exact.exp() * (exact - other)).sum(-1).mean().item()
    top1 = (exact.argmax(-1) == other.argmax(-1)).float().mean().item()
    target = torch.tensor(ids[-len(exact) + 1 :])[:, None]
    nll = [-x[:-1].gather(1, target).mean().item() for x in (exact, other)]
    return Quality(kl, top1, nll[1] - nll[0])
