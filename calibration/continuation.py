"""Run a few rows of a document on a quantised cache of everything before them.

    document = capture(model, ids, rows)           one exact pass: K, V of the first P = T - rows
                                                   tokens, and what the last rows gave exactly
    cache = Cache(document, method, params, ...)   those K and V, encoded and decoded, per layer
    cache.logits(ids of the last rows)             the rows through all layers on that cache

The exact pass is paid once per document; a method then costs ``rows`` rows. A query at position p
reads [n_sink, hist_end) quantised and the rest exactly, where

    hist_end = max(n_sink, p + 1 - n_recent), rounded down to a whole block for block codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..kernels.reference import first_exact
from .attention import causal_attention, replaced_attention
from .method import Method


@dataclass
class Document:
    """Exact K and V of ``prefix`` positions and the exact results of the rows after them.

    k, v    L x [P, Hk, D] in the model's dtype
    q, out  L x [H, rows, D] of the last rows; out before the output projection
    k_rows, v_rows  L x [Hk, rows, D]
    logits  [rows, vocab] float32
    """

    model: PreTrainedModel
    ids: torch.Tensor
    prefix: int
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    out: list[torch.Tensor] = field(default_factory=list)
    k_rows: list[torch.Tensor] = field(default_factory=list)
    v_rows: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    logits: torch.Tensor | None = None


@torch.no_grad()
def capture(model: PreTrainedModel, ids: torch.Tensor, rows: int) -> Document:
    """Run ``ids`` [T] exactly, keeping what continuations of its first T - rows tokens need."""
    p = len(ids) - rows
    doc = Document(model, ids, p)

    def attend(layer, q, k, v, scale):
        o = causal_attention(q.float(), k.float(), v.float(), scale)
        doc.scale = scale
        for store, x in ((doc.k, k), (doc.v, v)):
            store.append(x[0, :, :p].transpose(0, 1).clone())
        for store, x in ((doc.q, q), (doc.out, o), (doc.k_rows, k), (doc.v_rows, v)):
            store.append(x[0, :, p:].clone())
        return o.to(q.dtype)

    with replaced_attention(model, attend):
        out = model(ids[None].to(model.device), use_cache=False, logits_to_keep=max(1, rows))
    doc.logits = out.logits[0].float()
    return doc


class Cache:
    """A document's prefix as one method returns it.

    ``method`` None keeps everything exact. Rows at the end of the prefix that no query reads in
    quantised form are not encoded; ``queries`` is the number of positions after the prefix that
    will be asked for.
    """

    def __init__(
        self,
        document: Document,
        method: Method | None,
        params: Sequence,
        n_sink: int,
        n_recent: int,
        queries: int,
    ) -> None:
        self.doc = document
        self.method = method
        self.params = params
        self.n_sink, self.n_recent = n_sink, n_recent
        self.block = 1 if method is None else method.block
        self.num_bytes = self.elements = 0
        last = torch.tensor([document.prefix + queries - 1])
        sealed = min(document.prefix, int(self._ends(last)))
        self.sealed = max(n_sink, sealed - sealed % self.block)
        self.hats = [self._encode(layer) for layer in range(len(document.k))]

    @property
    def bits(self) -> float:
        """Measured bits per quantised element (16 if there is none)."""
        return 8 * self.num_bytes / self.elements if self.elements else 16.0

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, n]: B independent continuations of the prefix -> [B, n, vocab] float32."""
        model = self.doc.model
        positions = torch.arange(self.doc.prefix, self.doc.prefix + ids.shape[1])

        def attend(layer, q, k, v, scale):
            return self.attend(layer, q, k, v, positions, scale).to(q.dtype)

        with replaced_attention(model, attend):
            out = model(
                ids.to(model.device),
                position_ids=positions.expand_as(ids).to(model.device),
                use_cache=False,
            )
        return out.logits.float()

    @torch.no_grad()
    def output_error(self, every: int = 4) -> torch.Tensor:
        """Squared relative error of attention outputs [L, H] for the exact queries of every
        ``every``-th row: each layer's own damage, without what it inherits."""
        doc = self.doc
        rows = torch.arange(0, doc.q[0].shape[1], every)
        errors = []
        for layer in range(len(doc.q)):
            exact = doc.out[layer][:, rows].float()
            found = self.attend(
                layer,
                doc.q[layer][None, :, rows],
                doc.k_rows[layer][None],
                doc.v_rows[layer][None],
                doc.prefix + rows,
                doc.scale,
            )[0]
            norm = exact.square().sum((1, 2)).clamp_min(1e-30)
            errors.append((found - exact).square().sum((1, 2)) / norm)
        return torch.stack(errors).cpu()

    def _ends(self, positions: torch.Tensor) -> torch.Tensor:
        """hist_end of queries at ``positions`` [n] int64."""
        if self.method is None:
            return torch.zeros_like(positions)
        ring, start = self.n_recent + self.block - 1, torch.zeros_like(positions)
        return first_exact(positions + 1, start, self.n_sink, ring, self.block)

    def _encode(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Decoded rows of positions [n_sink, sealed), [Hk, n, D] float32."""
        if self.method is None or self.sealed <= self.n_sink:
            return None
        rows = slice(self.n_sink, self.sealed)
        return self._round_trip(layer, self.doc.k[layer][rows], self.doc.v[layer][rows], rows.start)

    def _round_trip(self, layer, k, v, first) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [T, Hk, D] through the codec -> [Hk, T, D] float32."""
        params = self.params[layer]
        encoded = self.method.encode(params, k.float(), v.float(), first)
        self.num_bytes += encoded.num_bytes
        self.elements += 2 * k.numel()
        return tuple(x.transpose(0, 1) for x in self.method.decode(params, encoded))

    def attend(self, layer, q, k, v, positions, scale) -> torch.Tensor:
        """Attention of rows after the prefix, float32 inside.

        q [B, H, n, D] at ``positions`` [n]; k, v [B, Hk, m, D] of positions P .. P + m
        -> [B, H, n, D] float32
        """
        b, heads, n, d = q.shape
        kv_heads = k.shape[1]
        ends = self._ends(positions)
        q = q.float().reshape(b, kv_heads, -1, n, d)
        logits, values = [], []
        for keys, vals, where, quantised in self._segments(layer, k, v, ends):
            seen = where <= positions[:, None]
            history = (where >= self.n_sink) & (where < ends[:, None])
            seen &= history if quantised else ~history
            scores = (q @ keys.mT[..., None, :, :]) * scale
            logits.append(scores.masked_fill_(~seen.to(q.device), -torch.inf))
            values.append(vals)
        weights = torch.cat(logits, -1).softmax(-1)
        out, start = 0, 0
        for vals in values:
            part = weights[..., start : start + vals.shape[-2]]
            out = out + part @ vals[..., None, :, :]
            start += vals.shape[-2]
        return out.reshape(b, heads, n, d)

    def _segments(self, layer, k, v, ends):
        """(keys, values [B or 1, Hk, m, D], positions [m], quantised) that may be read."""
        doc, p, m = self.doc, self.doc.prefix, k.shape[2]
        first_end, last_end = int(ends.min()), int(ends.max())
        exact = [(0, min(self.n_sink, p)), (max(self.n_sink, min(first_end, p)), p)]
        for a, b in exact:
            if a < b:
                rows = (x[layer][a:b].float().transpose(0, 1)[None] for x in (doc.k, doc.v))
                yield *rows, torch.arange(a, b), False
        if self.hats[layer] is not None:
            n = min(self.sealed, max(last_end, self.n_sink)) - self.n_sink
            if n > 0:
                rows = (x[None, :, :n] for x in self.hats[layer])
                yield *rows, torch.arange(self.n_sink, self.n_sink + n), True
        if last_end > self.sealed:
            yield *self._fresh_hats(layer, k, v, last_end), True
        yield k.float(), v.float(), torch.arange(p, p + m), False

    def _fresh_hats(self, layer, k, v, end):
        """Positions [sealed, end): the last rows of the prefix and continuation rows that have
        already left the recent window."""
        doc, rows = self.doc, []
        for i in range(len(k)):
            whole = (
                torch.cat([old[layer][self.sealed :], new[i].transpose(0, 1).to(old[layer].dtype)])
                for old, new in ((doc.k, k), (doc.v, v))
            )
            k_all, v_all = (x[: end - self.sealed] for x in whole)
            rows.append(self._round_trip(layer, k_all, v_all, self.sealed))
        k_hat, v_hat = (torch.stack(x) for x in zip(*rows, strict=True))
        return k_hat, v_hat, torch.arange(self.sealed, end)
