"""``--oscar-debug-tags`` on a CPU, where reads can be seen: every read of layer 0 is checked.

Checksums are of the rows as they were handed to the stores, not of what then lies there. After
layer 0's attention, the rows that really came out of the stores must be those of each position
exactly once, from the segment the design names, byte for byte. A block codec writes history block
by block, from rows that it reads back from the ring; these reads are checked like those of
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernels.codec import Rows
from ..kernels.reference import Segments, read_history
from .places import OwnershipError, Places, checksum
from .tags import Fresh, Tags


class Read(NamedTuple):
    """Rows that came out of a store: its places, whose they are (None: nobody's), their slots or
    positions and checksums, [n] both."""

    places: Places
    row: int | None
    address: torch.Tensor
    sums: torch.Tensor


class ReadTags(Tags):
    """Wraps the stores' readers and writers at layer 0. Nothing to wait for: it sees every read
    from the start."""

    def __init__(self, seg: Segments, req_to_token: torch.Tensor) -> None:
        super().__init__(seg, req_to_token, every=1)
        self.armed = True
        self.coded = torch.zeros_like(self.slots.bytes)  # checksums by slot, as written last
        self.handed: torch.Tensor | None = None  # checksums of the rows that windows got
        self.reads: list[Read] | None = None
        self.requests: list[tuple[int, int, int]] = []  # row, cached tokens, first exact position
        self.chains: dict[int, torch.Tensor] = {}  # of a row's tokens, fresh ones too
        for store, name, seen in (
            (seg.history, "read", self._history_read),
            (seg.windows, "read_sink", self._sink_read),
            (seg.windows, "read_recent", self._ring_read),
            (seg.history, "write", self._history_written),
            (seg.windows, "write", self._window_written),
        ):
            setattr(store, name, _observed(getattr(store, name), seen))

    # -- what the stores are told and what they return ------------------------------------------

    def _history_read(self, result, slots) -> None:
        if self.reads is not None:
            self.reads.append(Read(self.slots, None, slots, self._coded_sums(slots, *result)))

    def _sink_read(self, result, row, positions) -> None:
        self._window_read(self.sink, result, row, positions)

    def _ring_read(self, result, row, positions) -> None:
        self._window_read(self.ring, result, row, positions)

    def _window_read(self, places, result, row, positions) -> None:
        read = Read(places, row, positions, checksum(*result))
        if self.reads is not None:
            self.reads.append(read)
        elif len(positions):  # by the store of a block's last token
            self._check_read(row, read)

    def _history_written(self, _result, slots, k: Rows, v: Rows) -> None:
        if self.block > 1:
            fresh = self._fresh()
            last = int((fresh.slots == slots[-1]).nonzero()[0])
            row, end = int(fresh.rows[last]), int(fresh.positions[last]) + 1
            own = self.table[row, max(0, end - self.block) : end].long()
            if end % self.block or not torch.equal(slots, own):
                raise OwnershipError(f"request row {row} sealed {len(slots)} tokens up to {end}")
        self.coded[slots] = self._coded_sums(slots, k, v)

    def _window_written(self, _result, _rows, _positions, _ends, k, v) -> None:
        dtype = self.seg.windows.sink_k[0].dtype
        self.handed = checksum(k.to(dtype), v.to(dtype))

    def _fresh(self) -> Fresh:
        if self.fresh is None:
            raise OwnershipError("tokens are stored that no step has announced")
        return self.fresh

    def _put_sums(self, places: Places, address: torch.Tensor) -> torch.Tensor:
        if places is self.slots:
            return self.coded[address]
        if self.handed is None:
            raise OwnershipError(f"no {places.name} was written by the last step")
        return self.handed

    def _restored_sums(self, sums, slots, given, hit) -> torch.Tensor:
        n, dtype = min(self.n_sink, self.table.shape[1]), self.seg.windows.sink_k[0].dtype
        parts = zip(*(x.split(n) for x in (sums.clone(), slots, given, hit)), strict=True)
        return torch.cat([self._decoded(dtype, *part) for part in parts])

    def _decoded(self, dtype: torch.dtype, sums, slots, given, hit) -> torch.Tensor:
        """A request's, all of them decoded at once as by the code under test: single rows may round
        otherwise."""
        if held := int(given.sum()):
            rows = read_history(self.seg, 0, slots[:held], torch.arange(held))
            decoded = checksum(*(x.to(dtype) for x in rows))
            sums[:held] = torch.where(hit[:held], sums[:held], decoded)
        return sums

    # -- checks ----------------------------------------------------------------------------------

    def _check_bytes(self, row, position, slots, chains, exact) -> None:
        """When they are read."""
        self.chains = {int(r): chains[row == r] for r in row.unique()}

    def begin(self, rows, prefix, ends, tokens, slots) -> None:
        super().begin(rows, prefix, ends, tokens, slots)
        fresh, none = self._fresh(), slots[:0].long()
        for row in rows.unique().tolist():
            before = self.chains.get(row, none)
            self.chains[row] = torch.cat([before, fresh.chains[fresh.rows == row]])
        exact = self.boundary(prefix, rows).tolist()
        self.requests = list(zip(rows.tolist(), prefix.tolist(), exact, strict=True))
        self.reads, self.handed = [], None

    def attended(self, layer: int) -> None:
        """After a layer's attention and before its stores: what was really read."""
        if layer or self.reads is None:
            return
        reads, self.reads = self.reads, None
        for row, prefix, exact in self.requests:
            mine, n = [], 0
            while n < prefix and reads:
                mine.append(reads.pop(0))
                n += len(mine[-1].address)
            if row:
                self._check_request(row, prefix, exact, mine)
        if reads:
            raise OwnershipError(f"{len(reads)} reads of {reads[0].places.name}s by no request")

    def _check_request(self, row: int, prefix: int, exact: int, reads: list[Read]) -> None:
        seen = [torch.empty(0, dtype=torch.int64)]
        for read in reads:
            positions = self._check_read(row, read)
            for p in (int(positions.min()), int(positions.max())):
                expected = self.sink if p < self.n_sink else self.ring
                if self.n_sink <= p < exact:
                    expected = self.slots
                if read.places is not expected:
                    raise OwnershipError(
                        f"request row {row}: position {p} was read from a {read.places.name}, "
                        f"expected a {expected.name}"
                    )
            seen.append(positions)
        found = torch.cat(seen).sort().values
        if not torch.equal(found, torch.arange(prefix)):
            raise OwnershipError(f"request row {row} of {prefix} tokens read {found.tolist()}")

    def _check_read(self, row: int, read: Read) -> torch.Tensor:
        """Positions [n] that one read claims, after checking identity and bytes."""
        if read.row not in (None, row):
            raise OwnershipError(f"request row {row} read the {read.places.name}s of {read.row}")
        places, address, positions = read.places, read.address, read.address
        if places is self.slots:
            positions = places.position[address].clamp_min(0)
        else:
            address = row * places.per_row + positions % places.per_row
        chains, own = self.chains[row], positions.clamp_max(len(self.chains[row]) - 1)
        where = torch.full_like(positions, row), positions
        everywhere = torch.ones_like(positions, dtype=torch.bool)
        self._compare(places, where, address, chains[own], everywhere, read.sums)
        return positions


def _observed(original: Callable, seen: Callable) -> Callable:
    """``original(layer, ...)``, followed by ``seen(result, ...)`` at layer 0."""

    def call(layer, *args):
        result = original(layer, *args)
        if layer == 0:
            seen(result, *args)
        return result

    return call
