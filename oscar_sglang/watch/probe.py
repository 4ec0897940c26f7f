"""Do the kernels read what the reference reads? Run on the cache of a server as it is
(``--oscar-debug-tags`` on a GPU, layer 0, a few requests of a sampled step).

Records of addresses (``tags``) cannot show where a kernel looks. So the kernel that is about to
run is run once before, outside the CUDA graph: attend and merge with random queries, materialise as
it is. What it gives is compared with the reference, which is told the boundaries by the records.
"""

from __future__ import annotations

import torch

from ..kernels.decode import DecodeAttention
from ..kernels.materialise import materialise
from ..kernels.reference import Partial, attend, merge, rotate
from ..kernels.reference import materialise as reference_rows
from ..kernels.views import LayerView, prepare_queries
from ..pool.prefix_tiles import ExtendPlan, Tile
from .places import OwnershipError
from .tags import Tags

REQUESTS = 4  # compared in a step; the next step takes the next ones
CHUNK = 4096  # tokens of a request at a time
# Relative errors. Attend multiplies in FP16 and writes the model's dtype; one foreign token among n
# moves the mean of values by sqrt(2 / n). A materialised row is rounded to 16 bits.
ATTENTION_ERROR, ROW_ERROR = 3e-2, 2e-2


class Probe:
    """``views`` and ``attention``: what the backend reads layers by; ``scratch`` [2, n, Hk, D]."""

    def __init__(
        self,
        tags: Tags,
        views: list[LayerView],
        attention: DecodeAttention,
        scratch: torch.Tensor,
    ) -> None:
        self.tags, self.seg = tags, tags.seg
        self.views, self.attention, self.scratch = views, attention, scratch
        self.generator = torch.Generator(tags.device).manual_seed(0)
        self.next = self.probed = 0

    def __call__(self, rows: torch.Tensor, prefix: torch.Tensor, plan: ExtendPlan | None) -> int:
        """rows, prefix [B]: requests and their tokens in the cache; ``plan`` None: about to decode.
        Gives how many were compared; raises OwnershipError."""
        before = self.probed
        if plan is None:
            self._decode(rows, prefix)
        else:
            for tile in plan.tiles:
                self._extend(tile, rows, prefix, plan.hist_end)
        return self.probed - before

    def _chosen(self, rows: torch.Tensor, lengths: torch.Tensor) -> list[tuple[int, int, int]]:
        """(index in the batch, row, cached tokens) of the requests whose turn it is."""
        pairs = enumerate(zip(rows.tolist(), lengths.tolist(), strict=True))
        real = [(i, row, n) for i, (row, n) in pairs if row and n]
        at = self.next % max(len(real), 1)
        self.next += REQUESTS
        chosen = (real[at:] + real[:at])[:REQUESTS]
        self.probed += len(chosen)
        return chosen

    def _rows(self, row: int, first: int, n: int, boundary: int) -> tuple[torch.Tensor, ...]:
        """K and V [n, Hk, D] of positions first, first + 1, ..., as the reference reads them."""
        slots = self.tags.table[row, first : first + n].long()
        layout = self.seg.history.layouts[0]
        shape = (2, n, layout.kv_heads, layout.head_dim)
        out = torch.empty(shape, dtype=torch.float32, device=self.tags.device)
        reference_rows(self.seg, 0, row, slots, first, boundary, *out)
        return out[0], out[1]

    def _decode(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """rows, lengths [B]: requests about to decode and their tokens in the cache. As if the last
        token had been computed again, with another query."""
        if not (chosen := self._chosen(rows, lengths)):
            return
        attention, view = self.attention, self.views[0]
        step = attention.step(len(rows))
        step.plan(rows, lengths, self.seg.windows.recent_start)
        shape = (len(rows), attention.heads, attention.head_dim)
        q = torch.randn(shape, generator=self.generator, device=self.tags.device)
        q_rot = prepare_queries(view, q)
        # Logits of about 1, so that every token counts.
        keys, _ = self._rows(chosen[0][1], 0, min(chosen[0][2], 16), self.tags.n_sink)
        scale = 1 / max(float(keys.norm(dim=-1).mean()), 1e-6)
        out = torch.empty(shape, dtype=view.sink_k.dtype, device=self.tags.device)
        step(view, q_rot, self.tags.table, out, scale=scale)
        boundary = self.tags.boundary(lengths - 1, rows).minimum(lengths - 1).tolist()
        for i, row, length in chosen:
            found = Partial.empty(1, attention.heads, attention.head_dim, self.tags.device)
            for first in range(0, length, CHUNK):
                keys, values = self._rows(row, first, min(CHUNK, length - first), boundary[i])
                found = merge(
                    found, attend(q_rot[i : i + 1, :, : q.shape[-1]], keys, values, scale)
                )
            want = rotate(found.out, view.params.r_v.mT)[0]
            error = (out[i].float() - want).norm() / want.norm()
            if bool(want.isfinite().all()) and not float(error) <= ATTENTION_ERROR:
                raise OwnershipError(
                    f"request row {row}: the attend kernel is {float(error):.2g} away from the "
                    f"reference over the same {length} tokens"
                )

    def _extend(self, tile: Tile, rows: torch.Tensor, prefix: torch.Tensor, hist_end) -> None:
        """A tile of cached prefixes; rows, prefix and hist_end (the backend's) [B] of the batch."""
        keys, values = self.scratch[:, : tile.tokens]
        materialise(
            self.views[0],
            self.tags.table,
            tile.rows,
            tile.starts,
            tile.cu_k,
            hist_end[tile.requests],
            tile.max_k,
            keys,
            values,
        )
        rows, prefix = rows[tile.requests], prefix[tile.requests]
        boundary = self.tags.boundary(prefix, rows).minimum(prefix).tolist()
        starts, ends = tile.starts.tolist(), tile.cu_k.tolist()
        for i, row, _ in self._chosen(rows, tile.cu_k.diff()):
            for at in range(ends[i], ends[i + 1], CHUNK):
                n = min(CHUNK, ends[i + 1] - at)
                first = starts[i] + at - ends[i]
                want = self._rows(row, first, n, boundary[i])
                for name, got, rows_wanted in zip("KV", (keys, values), want, strict=True):
                    self._same_rows(name, row, first, got[at : at + n], rows_wanted)

    def _same_rows(self, name: str, row: int, first: int, got, want) -> None:
        error = (got.float() - want).flatten(1).norm(dim=-1)
        wrong = ~(error <= ROW_ERROR * want.flatten(1).norm(dim=-1) + 1e-6)
        wrong &= want.flatten(1).isfinite().all(-1)
        if bool(wrong.any()):
            raise OwnershipError(
                f"request row {row}, position {first + int(wrong.nonzero()[0])}: the materialise "
                f"kernel gives another {name} row than the reference ({int(wrong.sum())} in all)"
            )
