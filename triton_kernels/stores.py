"""The three stores behind the KV pool, as plain torch tensors on any device.

    HistoryStore   2-bit codes + metadata of every slot of SGLang's allocator (written through)
    WindowStore    exact rotated rows of running requests: sink and recent ring, by request row
    SinkCache      exact sink rows of cached prefixes, direct-mapped by slot

None of them owns or frees anything: slots are SGLang's, request rows are SGLang's, and the sink
cache is a hint whose tag says whether it can be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .codec_affine import Rows
from .layout import BLOCK, HistoryLayout, WindowLayout

_META_DTYPES = {1: torch.uint8, 2: torch.float16}


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class LayerStack(list):
    """One tensor per layer, all views of ``stack`` [L, ...]: a kernel can reach every layer."""

    def __init__(self, layers: int, shape: tuple[int, ...], dtype, device) -> None:
        self.stack = torch.zeros((layers, *shape), dtype=dtype, device=device)
        super().__init__(self.stack.unbind(0))


class HistoryStore:
    """Packed rows of all slots.

    layouts   L HistoryLayout (the constructor takes one for all layers, or one each)
    base      [bytes] uint8, all layers one after another; layer i begins at byte ``offsets[i]``
    blocks    L x [num_blocks, Hk, block_bytes] uint8, views of ``base``
    channels  L x [ceil(slots / block), Hk, D, 2] float16 (step, lo); of block codecs, else empty
    """

    def __init__(
        self,
        layout: HistoryLayout | Sequence[HistoryLayout],
        layers: int,
        num_slots: int,
        device,
    ) -> None:
        if isinstance(layout, HistoryLayout):
            layout = [layout] * layers
        self.layouts = list(layout)
        if len(self.layouts) != layers:
            raise ValueError(f"{len(self.layouts)} layouts for {layers} layers")
        self.num_slots = num_slots
        shapes = [(h.num_blocks(num_slots), h.kv_heads, h.block_bytes) for h in self.layouts]
        sizes = [math.prod(shape) for shape in shapes]
        ends = torch.tensor([0, *sizes]).cumsum(0)
        self.base = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=device)
        self.offsets = ends[:-1].to(device)
        parts = self.base.split(sizes)
        self.blocks = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        h = self.layouts[0]
        shape = (-(-num_slots // h.block), h.kv_heads, h.head_dim, 2)
        self.channels = LayerStack(layers, shape, torch.float16, device) if h.block > 1 else []

    @property
    def num_bytes(self) -> int:
        return nbytes(self.base, *self.channels)

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of K and V [num_blocks, Hk, chunks, BLOCK, chunk_bytes], and the metadata
        [num_blocks, Hk, BLOCK, M]."""
        h = self.layouts[layer]
        k_size, v_size = BLOCK * h.k_row_bytes, BLOCK * h.v_row_bytes
        meta_size = h.block_bytes - k_size - v_size
        k, v, meta = self.blocks[layer].split((k_size, v_size, meta_size), -1)
        return (
            k.unflatten(-1, (-1, BLOCK, h.k_chunk_bytes)),
            v.unflatten(-1, (-1, BLOCK, h.v_chunk_bytes)),
            meta.view(_META_DTYPES[h.meta_bytes]).unflatten(-1, (BLOCK, h.meta_fields)),
        )

    def write(self, layer: int, slots: torch.Tensor, k: Rows, v: Rows) -> None:
        """Write encoded rows [T, Hk, ...] to ``slots`` [T] int64 (distinct, except padding 0)."""
        k_codes, v_codes, meta = self.views(layer)
        block, token = slots // BLOCK, slots % BLOCK
        for codes, packed in ((k_codes, k.packed), (v_codes, v.packed)):
            codes[block, :, :, token] = packed.unflatten(-1, (-1, codes.shape[-1]))
        meta[block, :, token] = torch.cat([k.meta, v.meta], -1)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Rows, Rows]:
        """Encoded K and V rows [T, Hk, ...] of ``slots`` [T] int64."""
        k_codes, v_codes, meta = self.views(layer)
        block, token = slots // BLOCK, slots % BLOCK
        k, v = (codes[block, :, :, token].flatten(-2) for codes in (k_codes, v_codes))
        k_meta, v_meta = meta[block, :, token].tensor_split([self.layouts[layer].k_meta], -1)
        return Rows(k, k_meta), Rows(v, v_meta)


class WindowStore:
    """Exact rotated rows, addressed by (request row, position).

    sink_k, sink_v      L x [R, n_sink, Hk, D]    position p < n_sink at [row, p]
    recent_k, recent_v  L x [R, n_recent, Hk, D]  position p at [row, p % n_recent]
    recent_start        [R] int64                 first position whose row is in the ring
    written             [R] int64                 end of the positions that were put there

    A row may outlive its request (sessions) and go on before the end of what it was written to: the
    ring then holds positions of ``written - n_recent`` on, the older ones are overwritten.
    """

    def __init__(
        self, windows: WindowLayout, history: HistoryLayout, layers: int, rows: int, dtype, device
    ) -> None:
        self.windows = windows

        def alloc(n: int) -> LayerStack:
            shape = (rows, n, history.kv_heads, history.head_dim)
            return LayerStack(layers, shape, dtype, device)

        self.sink_k, self.sink_v = alloc(windows.n_sink), alloc(windows.n_sink)
        self.recent_k, self.recent_v = alloc(windows.n_recent), alloc(windows.n_recent)
        self.recent_start = torch.zeros(rows, dtype=torch.int64, device=device)
        self.written = torch.zeros_like(self.recent_start)

    def go_on(self, rows: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """Before ``rows`` [B] are read at ``prefix_lens`` [B] int64: forget ring rows that tokens
        beyond the prefix have overwritten. Nothing to forget where a row goes on at its end."""
        start, written = self.recent_start[rows], self.written[rows]
        low = torch.maximum(start, written - self.windows.n_recent)
        cut = torch.minimum(low, torch.maximum(start, prefix_lens))
        self.recent_start[rows] = torch.where(written > prefix_lens, cut, start)

    def begin(self, row: int, prefix_len: int, source: int = 0, low: int = 0) -> None:
        """``row`` goes to a request with ``prefix_len`` cached tokens, whose K and V are exact in
        the ring of row ``source`` from position ``low`` < ``prefix_len`` on (0: nowhere)."""
        first = max(low, prefix_len - self.windows.n_recent) if source else prefix_len
        if source not in (0, row):
            index = torch.arange(first, prefix_len) % self.windows.n_recent
            for rings in (self.recent_k.stack, self.recent_v.stack):
                rings[:, row, index] = rings[:, source, index]
        self.recent_start[row], self.written[row] = first, prefix_len

    @property
    def num_bytes(self) -> int:
        return nbytes(*self.sink_k, *self.sink_v, *self.recent_k, *self.recent_v)

    def write(
        self,
        layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ends: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write rotated rows k, v [T, Hk, D] of tokens at (rows, positions) [T] int64.

        ``ends`` [T]: context length of the token's request after this batch; only the last
        ``n_recent`` positions of a chunk go to the ring, so no ring row is written twice.
        """
        w = self.windows
        sink = positions < w.n_sink
        self._put(self.sink_k, self.sink_v, layer, rows, positions, sink, k, v)
        recent = positions >= ends - w.n_recent
        self._put(self.recent_k, self.recent_v, layer, rows, positions % w.n_recent, recent, k, v)

    @staticmethod
    def _put(keys, values, layer, rows, index, mask, k, v) -> None:
        keys[layer][rows[mask], index[mask]] = k[mask].to(keys[layer].dtype)
        values[layer][rows[mask], index[mask]] = v[mask].to(values[layer].dtype)

    def read_sink(self, layer: int, row: int, positions: torch.Tensor):
        return self.sink_k[layer][row, positions], self.sink_v[layer][row, positions]

    def read_recent(self, layer: int, row: int, positions: torch.Tensor):
        index = positions % self.windows.n_recent
        return self.recent_k[layer][row, index], self.recent_v[layer][row, index]


class SinkCache:
    """Direct-mapped exact sink rows: slot ``s`` lives in row ``s % C`` while ``tag`` says so.

    k, v  L x [C, Hk, D]     tag  [C] int64, the slot held or -1

    A sink token is always written through, so a tag that matches can only hold the newest row
    of that slot; a slot that was given to a non-sink position is never asked for.
    """

    def __init__(self, history: HistoryLayout, layers: int, cache_rows: int, dtype, device) -> None:
        shape = (cache_rows, history.kv_heads, history.head_dim)
        self.k = LayerStack(layers, shape, dtype, device)
        self.v = LayerStack(layers, shape, dtype, device)
        self.tag = torch.full((cache_rows,), -1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return nbytes(*self.k, *self.v, self.tag)

    def winners(self, slots: torch.Tensor) -> torch.Tensor:
        """Mask over ``slots`` [T]: among slots that share a row the last one wins, so that all
        layers and the tag agree."""
        rows = slots % self.tag.shape[0]
        order = torch.arange(len(slots), device=slots.device)
        last = torch.full_like(self.tag, -1).scatter_reduce(0, rows, order, "amax")
        return last[rows] == order

    def claim(self, slots: torch.Tensor) -> None:
        """Tag the rows of ``slots`` [T] (winners only) before their layers are written."""
        self.tag[slots % self.tag.shape[0]] = slots

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        index = slots % self.tag.shape[0]
        self.k[layer][index] = k.to(self.k[layer].dtype)
        self.v[layer][index] = v.to(self.v[layer].dtype)

    def hits(self, slots: torch.Tensor) -> torch.Tensor:
        return self.tag[slots % self.tag.shape[0]] == slots

    def read(self, layer: int, slots: torch.Tensor):
        index = slots % self.tag.shape[0]
        return self.k[layer][index], self.v[layer][index]
