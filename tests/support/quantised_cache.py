"""Run a transformers model on a quantised KV cache, with the codecs the server uses: what the
server and the evaluator are tested against.

    with QuantisedCache(model, artifact, windows, exact_prefix=P):
        logits = model(input_ids).logits

A query at position p reads K and V of positions ``[n_sink, hist_end[p])`` in quantised form and
all others exactly. By default ``hist_end[p] = max(n_sink, p + 1 - n_recent)`` for p >= P (a decode
step) and nothing is quantised for p < P (one fresh prefill); other schedules (chunked prefill,
cached prefixes) are given as a tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from oscar_sglang.artifact.file import Artifact
from oscar_sglang.calibration.attention import causal_attention, replaced_attention
from oscar_sglang.kernels.codec import LayerCodec
from oscar_sglang.kernels.layout import WindowLayout

_QUERY_TILE = 256


class _Memo(NamedTuple):
    """Rows of one layer quantised so far, [B, n, Hk, D] each."""

    k: torch.Tensor
    v: torch.Tensor
    k_hat: torch.Tensor
    v_hat: torch.Tensor


class QuantisedCache:
    """Context manager; see the module docstring.

    windows       exact sink and recent tokens
    exact_prefix  query positions below it read everything exactly
    hist_end      [>= positions] int, per query position; replaces the default schedule and
                  ``exact_prefix``; values <= n_sink mean that nothing is quantised
    """

    def __init__(
        self,
        model: PreTrainedModel,
        artifact: Artifact,
        windows: WindowLayout,
        exact_prefix: int = 0,
        hist_end: torch.Tensor | None = None,
    ) -> None:
        self.model = model
        self.codecs = [LayerCodec(c.spec, c.params.to(model.device)) for c in artifact.codecs]
        self.windows = windows
        self.exact_prefix = exact_prefix
        self.hist_end = hist_end
        self.memo: dict[int, _Memo] = {}

    def __enter__(self) -> QuantisedCache:
        self._stack = ExitStack()
        self._stack.enter_context(replaced_attention(self.model, self._attend))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()
        self.memo.clear()

    def history_end(self, positions: torch.Tensor) -> torch.Tensor:
        """End of the quantised positions for queries at ``positions`` [T] int64."""
        if self.hist_end is not None:
            return torch.minimum(self.hist_end.to(positions)[positions], positions + 1)
        end = (positions + 1 - self.windows.n_recent).clamp_min(self.windows.n_sink)
        return torch.where(positions < self.exact_prefix, 0, end)

    @torch.no_grad()
    def _attend(self, layer, q, k, v, scale):
        q_len, k_len = q.shape[2], k.shape[2]
        positions = torch.arange(k_len - q_len, k_len, device=q.device)
        ends = self.history_end(positions)
        exact = int((ends > self.windows.n_sink).long().cummax(0).values.eq(0).sum())
        out = torch.empty_like(q)
        if q_len == k_len and exact:
            out[:, :, :exact] = causal_attention(*(x[:, :, :exact] for x in (q, k, v)), scale)
        else:
            exact = 0
        if exact < q_len:
            history = slice(self.windows.n_sink, max(self.windows.n_sink, int(ends.max())))
            k_hat, v_hat = self._quantised(layer, k[:, :, history], v[:, :, history])
            for start in range(exact, q_len, _QUERY_TILE):
                tile = slice(start, start + _QUERY_TILE)
                out[:, :, tile] = _attend_mixed(
                    q[:, :, tile], k, v, k_hat, v_hat, self.codecs[layer].params,
                    positions[tile], ends[tile], self.windows.n_sink, scale,
                ).to(q.dtype)  # fmt: skip
        return out

    def _quantised(self, layer, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised rows of k, v [B, Hk, n, D] -> [B, Hk, n, D] float32, rotated. Rows that an
        earlier call has seen unchanged are not encoded again: a code depends on its row alone."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        memo = self.memo.get(layer)
        known = 0 if memo is None else min(memo.k.shape[1], k.shape[1])
        if not known or not (
            torch.equal(memo.k[:, :known], k[:, :known])
            and torch.equal(memo.v[:, :known], v[:, :known])
        ):
            known = 0
        fresh_k, fresh_v = k[:, known:], v[:, known:]
        first = self.windows.n_sink + known
        positions = torch.arange(first, first + fresh_k.shape[1], device=k.device)
        rows = fresh_k.flatten(0, 1), fresh_v.flatten(0, 1), positions.repeat(len(k))
        k_hat, v_hat = (x.view(fresh_k.shape) for x in self.codecs[layer].quantised(*rows))
        if known:
            k_hat = torch.cat([memo.k_hat[:, :known], k_hat], 1)
            v_hat = torch.cat([memo.v_hat[:, :known], v_hat], 1)
        self.memo[layer] = _Memo(k.clone(), v.clone(), k_hat, v_hat)
        return k_hat.transpose(1, 2), v_hat.transpose(1, 2)


def _attend_mixed(q, k, v, k_hat, v_hat, params, positions, ends, n_sink, scale) -> torch.Tensor:
    """Softmax over exact and quantised positions, float32.

    q [B, H, T, D]; k, v [B, Hk, S, D]; k_hat, v_hat [B, Hk, n, D] rotated, of positions
    n_sink .. n_sink + n; positions, ends [T] -> [B, H, T, D]
    """
    b, heads, t, d = q.shape
    q, k, v = (x.float() for x in (q.reshape(b, k.shape[1], -1, d), k, v))
    group = heads // k.shape[1]
    keys = torch.arange(k.shape[2], device=q.device)
    visible = (keys <= positions[:, None]).repeat(group, 1)
    quantised = ((keys >= n_sink) & (keys < ends[:, None])).repeat(group, 1)
    history = slice(n_sink, n_sink + k_hat.shape[2])

    logits = q @ k.mT
    logits[..., history] = torch.where(
        quantised[:, history], (q @ params.queries) @ k_hat.mT, logits[..., history]
    )
    weights = (logits * scale).masked_fill(~visible, float("-inf")).softmax(-1)
    out = weights.masked_fill(quantised, 0) @ v
    coded = weights.masked_fill(~quantised, 0)[..., history]
    out = out + (coded @ v_hat) @ params.r_v.mT
    return out.view(b, heads, t, d)
