"""Every byte of the three-segment KV cache, in one place. Standard library only.

Shape letters used throughout the project:

    T  tokens of a batch        B  requests of a batch      S  context length of a request
    H  query heads              Hk KV heads (of this rank)  G  H // Hk
    D  head_dim                 L  attention layers         R  request rows (row 0 is padding)

History block. One block holds ``BLOCK`` consecutive slots; a layer is one tensor
``[num_blocks, Hk, block_bytes]`` of uint8 and a slot is ``(slot // BLOCK, slot % BLOCK)``::

    one head of one block:  [K chunks][BLOCK tokens][k_chunk_bytes]    codes of K
                            [V chunks][BLOCK tokens][v_chunk_bytes]    codes of V
                            [BLOCK tokens][k_meta + v_meta]            metadata

Metadata of a row are numbers of one width, K's before V's: (step, lo) in 16 or in 8 bits, or one
16-bit scale, as the codec says (``codec.CodecSpec``). A block codec keeps besides, per ``block``
consecutive slots (a page) and KV head, step and lo of each of K's D channels in FP16.

A row of D codes of b bits is D b / 16 16-bit halves; half ``i`` holds channels ``i + (D b / 16) j``
in bits ``b j .. b j + b - 1``. ANDing a half with ``3 << 2j`` leaves a denormal FP16 number, which
is how the CUDA kernel feeds codes to the tensor cores without converting them. K and V of a layer
have 2 or 4 bits each; where they differ between layers so do the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK = 16
BITS = 2
WIDTHS = (2, 4)  # bits a K or V of a layer may have
MAX_CHUNK_BYTES = 16
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128, 256)
PADDED_HEAD_DIMS = (80, 96, 112)  # kept as heads of 128 channels, the last of them zero


def stored_head_dim(head_dim: int) -> int:
    """Channels that a row of ``head_dim`` has in the cache. ValueError if it has no layout."""
    if head_dim in SUPPORTED_HEAD_DIMS:
        return head_dim
    if head_dim in PADDED_HEAD_DIMS:
        return 128
    known = ", ".join(map(str, sorted(SUPPORTED_HEAD_DIMS + PADDED_HEAD_DIMS)))
    raise ValueError(f"head_dim {head_dim} has no 2-bit layout; supported: {known}")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class HistoryLayout:
    """Bytes of packed history for one attention layer.

    ``k_meta``/``v_meta`` count the metadata of a K/V row (step and lo: 2), numbers of
    ``meta_bytes`` each. The kernels count in 16 bits, so a row's metadata fill whole halves.
    ``block`` > 1: slots whose K share metadata per channel.
    """

    kv_heads: int
    head_dim: int
    k_meta: int = 2
    v_meta: int = 2
    meta_bytes: int = 2
    block: int = 1
    k_bits: int = BITS
    v_bits: int = BITS

    def __post_init__(self) -> None:
        if not {self.k_bits, self.v_bits} <= set(WIDTHS):
            raise ValueError(f"K and V have 2 or 4 bits, got {self.k_bits} and {self.v_bits}")
        if stored_head_dim(self.head_dim) != self.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is stored as {stored_head_dim(self.head_dim)}"
            )
        if self.kv_heads < 1:
            raise ValueError(f"kv_heads must be >= 1, got {self.kv_heads}")
        if self.meta_bytes not in (1, 2) or any(
            n < 1 or n * self.meta_bytes % 2 for n in (self.k_meta, self.v_meta)
        ):
            raise ValueError(f"metadata must fill 16-bit halves, got {self}")

    @property
    def k_row_bytes(self) -> int:
        """Code bytes of one K row."""
        return self.head_dim * self.k_bits // 8

    @property
    def v_row_bytes(self) -> int:
        return self.head_dim * self.v_bits // 8

    @property
    def k_chunk_bytes(self) -> int:
        return min(MAX_CHUNK_BYTES, self.k_row_bytes)

    @property
    def v_chunk_bytes(self) -> int:
        return min(MAX_CHUNK_BYTES, self.v_row_bytes)

    @property
    def meta_fields(self) -> int:
        return self.k_meta + self.v_meta

    @property
    def code_bytes_per_block(self) -> int:
        """Code bytes of one head of one block; metadata starts here."""
        return (self.k_row_bytes + self.v_row_bytes) * BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of one head of one block."""
        return self.code_bytes_per_block + self.meta_fields * self.meta_bytes * BLOCK

    @property
    def channel_bytes(self) -> int:
        """Bytes of the channel metadata of ``block`` slots, all KV heads."""
        return self.kv_heads * self.head_dim * 4 if self.block > 1 else 0

    @property
    def _row_bytes(self) -> int:
        """One K and one V row of a head, metadata included."""
        return self.k_row_bytes + self.v_row_bytes + self.meta_fields * self.meta_bytes

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in one layer, K and V, all KV heads, metadata included (rounded up)."""
        return self.kv_heads * self._row_bytes + _ceil_div(self.channel_bytes, self.block)

    @property
    def bits_per_element(self) -> float:
        total = self.kv_heads * self._row_bytes + self.channel_bytes / self.block
        return 8 * total / (2 * self.kv_heads * self.head_dim)

    def num_blocks(self, num_slots: int) -> int:
        return _ceil_div(num_slots, BLOCK)


@dataclass(frozen=True)
class WindowLayout:
    """Exact windows of a request: ``n_sink`` first and ``n_recent`` last positions."""

    n_sink: int = 64
    n_recent: int = 256

    def __post_init__(self) -> None:
        for name, value in (("sink", self.n_sink), ("recent", self.n_recent)):
            if value < 1:
                raise ValueError(f"the {name} window must hold at least 1 token, got {value}")

    @property
    def tokens(self) -> int:
        return self.n_sink + self.n_recent


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank allocates for the KV cache, in bytes, part by part.

    ``itemsize`` is that of a window element (the model's dtype), ``scratch_itemsize`` that of a
    materialised row. ``widths``: (k_bits, v_bits) of each layer; empty where all layers are
    ``history``. ``codec_floats`` counts the float32 numbers a layer's codec keeps on the
    device for one KV head, ``table_bytes`` what it keeps for all layers; ``workspace_bytes`` are
    the kernels' own static buffers. ``rows`` are request rows: SGLang's padding row, those of
    running requests, and ``parked_rows`` more whose rings outlive their requests. ``head_dim``:
    the model's, where ``history`` has padded heads.
    """

    layers: int
    history: HistoryLayout
    windows: WindowLayout
    rows: int
    sink_cache_rows: int
    scratch_tokens: int
    itemsize: int
    scratch_itemsize: int = 4
    codec_floats: int = 0
    workspace_bytes: int = 0
    widths: tuple[tuple[int, int], ...] = ()
    table_bytes: int = 0
    parked_rows: int = 0
    head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.widths and len(self.widths) != self.layers:
            raise ValueError(f"widths of {len(self.widths)} layers, expected {self.layers}")

    @property
    def requests(self) -> int:
        """That can run at once."""
        return self.rows - 1 - self.parked_rows

    @property
    def layouts(self) -> list[HistoryLayout]:
        """Of each layer."""
        if not self.widths:
            return [self.history] * self.layers
        return [replace(self.history, k_bits=k, v_bits=v) for k, v in self.widths]

    @property
    def bytes_per_token(self) -> int:
        """Marginal cost of one more slot, all layers."""
        return sum(h.bytes_per_slot for h in self.layouts)

    @property
    def bits_per_element(self) -> float:
        """Of history, mean over the layers; of the model's elements, without padding."""
        stored = sum(h.bits_per_element for h in self.layouts) / self.layers
        return stored * self.history.head_dim / self._model_head_dim

    @property
    def _model_head_dim(self) -> int:
        return self.head_dim or self.history.head_dim

    @property
    def bf16_bytes_per_token(self) -> int:
        """What SGLang's BF16 cache would spend on a slot."""
        return self.layers * self.history.kv_heads * 2 * self._model_head_dim * 2

    @property
    def _row_bytes(self) -> int:
        """One exact K and V row of one layer."""
        return self.history.kv_heads * 2 * self.history.head_dim * self.itemsize

    def history_bytes(self, num_slots: int) -> int:
        return sum(
            h.num_blocks(num_slots) * h.kv_heads * h.block_bytes
            + _ceil_div(num_slots, h.block) * h.channel_bytes
            for h in self.layouts
        )

    @property
    def window_bytes(self) -> int:
        return self.layers * self.rows * self.windows.tokens * self._row_bytes

    @property
    def sink_cache_bytes(self) -> int:
        return self.sink_cache_rows * (self.layers * self._row_bytes + 8)

    @property
    def scratch_bytes(self) -> int:
        row = self.history.kv_heads * 2 * self.history.head_dim
        return self.scratch_tokens * row * self.scratch_itemsize

    @property
    def codec_bytes(self) -> int:
        return self.layers * self.history.kv_heads * self.codec_floats * 4 + self.table_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything that does not grow with the number of slots."""
        return (
            self.window_bytes
            + self.sink_cache_bytes
            + self.scratch_bytes
            + self.codec_bytes
            + self.workspace_bytes
        )

    def effective_bits(self, context: int) -> float:
        """Bits per K/V element of one request of ``context`` tokens: its own history rows plus
        its exact window rows (every window token also has a history row)."""
        exact = min(context, self.windows.tokens) * self._row_bytes * self.layers
        elements = context * self.layers * self.history.kv_heads * 2 * self._model_head_dim
        return 8 * (context * self.bytes_per_token + exact) / elements

    def break_even(self) -> int:
        """Shortest context at which a request costs less than in SGLang's BF16 cache.

        A request pays its whole windows whether it fills them or not.
        """
        window = self.layers * self.windows.tokens * self._row_bytes
        return _ceil_div(window, self.bf16_bytes_per_token - self.bytes_per_token)
