"""One document each: what runs on its cache and what is measured.

A unit names itself (``key``), makes the exact pass (``capture``) and turns a ``Cache`` into
figures (``measure``, JSON values). All figures are means over the unit's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from ..continuation import Cache, Document, capture

ROWS = 129  # teacher-forced at the end of a document: 128 predictions with a known next token


@dataclass
class Text:
    """Last ``ROWS`` rows of a document, and greedy generation from the row before them."""

    name: str
    context: int
    ids: torch.Tensor
    greedy: int = 0
    continuation: torch.Tensor | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        return f"text/{self.context}/{self.name}"

    @property
    def queries(self) -> int:
        return max(ROWS, self.greedy)

    def capture(self, model: PreTrainedModel) -> Document:
        doc = capture(model, self.ids, ROWS)
        if self.greedy:
            self.continuation = greedy_tokens(doc, self.greedy)
        return doc

    def measure(self, cache: Cache) -> dict:
        rows = self.ids[-ROWS:]
        figures = compare(cache.doc.logits, cache.logits(rows[None])[0], rows)
        figures["error"] = [[float(f"{e:.4g}") for e in r] for r in cache.output_error().tolist()]
        if self.greedy:
            inputs = torch.cat([rows[:1], self.continuation[:-1]])
            found = cache.logits(inputs[None])[0].argmax(-1).cpu()
            figures["agree"] = int((found == self.continuation).long().cumprod(0).sum())
        return figures


@dataclass
class Induction:
    """A random sequence said twice: how much of the end of the second copy is predicted."""

    name: str
    ids: torch.Tensor
    queries = ROWS

    @property
    def key(self) -> str:
        return f"induct/{self.name}"

    def capture(self, model: PreTrainedModel) -> Document:
        return capture(model, self.ids, ROWS)

    def measure(self, cache: Cache) -> dict:
        rows = self.ids[-ROWS:]
        found = cache.logits(rows[None])[0, :-1].argmax(-1).cpu()
        return {"induct": (found == rows[1:]).double().mean().item()}


@dataclass
class Recall:
    """Questions about facts in a document; right if every token of the greedy answer is."""

    name: str
    context: int
    facts: int
    ids: torch.Tensor
    questions: list[tuple[torch.Tensor, torch.Tensor]]  # (prompt, answer) ids

    @property
    def key(self) -> str:
        return f"recall/{self.context}/{self.name}"

    @property
    def queries(self) -> int:
        return max(len(p) + len(a) - 1 for p, a in self.questions)

    def capture(self, model: PreTrainedModel) -> Document:
        return capture(model, self.ids, 0)

    def measure(self, cache: Cache) -> dict:
        """All questions in one batch of padded rows; padding comes after what is read."""
        batch = torch.zeros(len(self.questions), self.queries, dtype=torch.int64)
        for row, (prompt, answer) in zip(batch, self.questions, strict=True):
            inputs = torch.cat([prompt, answer[:-1]])
            row[: len(inputs)] = inputs
        found = cache.logits(batch).argmax(-1).cpu()
        right = 0
        for row, (prompt, answer) in zip(found, self.questions, strict=True):
            first = len(prompt) - 1
            right += bool((row[first : first + len(answer)] == answer).all())
        return {"right": right, "asked": len(self.questions), "facts": self.facts}


Unit = Text | Induction | Recall


def compare(exact: torch.Tensor, found: torch.Tensor, ids: torch.Tensor) -> dict:
    """Logits [n, vocab] of rows whose inputs are ``ids`` [n]: KL in nats, top-1 agreement, and
    the mean negative log-likelihood of the next tokens."""
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    target = ids[1:, None].to(p.device)
    nll = [-x[:-1].gather(1, target).mean().item() for x in (p, q)]
    return {
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "top1": (p.argmax(-1) == q.argmax(-1)).double().mean().item(),
        "nll": nll[1],
        "dnll": nll[1] - nll[0],
    }


@torch.no_grad()
def greedy_tokens(doc: Document, n: int) -> torch.Tensor:
    """The n tokens the exact model generates after position ``doc.prefix``, [n] int64."""
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(doc.k, doc.v, strict=True)):
        cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
    token = doc.ids[doc.prefix]
    tokens = []
    for _ in range(n):
        ids = token.view(1, 1).to(doc.model.device)
        token = doc.model(ids, past_key_values=cache).logits[0, -1].argmax()
        tokens.append(int(token))
    return torch.tensor(tokens)
