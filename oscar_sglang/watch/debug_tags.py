"""``--oscar-debug-tags``: does attention read the tokens it believes it reads? (reference path;
``gpu_tags`` is the form for a GPU)

Beside every place that holds a token (history slot, sink row, ring row, sink-cache row) the oracle
keeps its own record of what was put there:

    chain   one number for the token *and everything before it in its sequence*: the position and
            the token id, hashed on top of the predecessor's chain. Two requests that share a prefix
            agree on it, any other two differ, so it survives prefix sharing and slot replacement.
    bytes   checksum of the layer-0 row as it was handed to the store

A request's chain is taken over from the slots of its prefix hit (where it must be unbroken from
position 0) and from then on belongs to its row. Before layer 0 every prefix slot must still carry
it; after layer 0's attention, the rows that really came out of the stores must be those of each
position exactly once, from the segment the design names, byte for byte. Addresses and boundaries
are computed here once more and not asked from the code under test. Layer 0 stands for all: every
layer uses the same addresses. A block codec writes history block by block, from rows that it reads
back from the ring; these reads are checked like those of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.codec import Rows
from ..kernels.reference import Batch, Segments, read_history

_MASK = (1 << 63) - 1
_ROOT = 0x5EED


class OwnershipError(RuntimeError):
    """Attention would read, or has read, something else than the token it asked for."""


def link(previous: int, token: int, position: int) -> int:
    """Chain of a token whose predecessor has chain ``previous`` (``_ROOT`` at position 0)."""
    x = (previous ^ (token + 1) * 0x9E3779B97F4A7C15 ^ (position + 1) * 0xC2B2AE3D27D4EB4F) & _MASK
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & _MASK
    return x ^ x >> 32


def chain(tokens: list[int], previous: int = _ROOT, start: int = 0) -> list[int]:
    out = []
    for position, token in enumerate(tokens, start):
        previous = link(previous, token, position)
        out.append(previous)
    return out


def checksum(*rows: torch.Tensor) -> torch.Tensor:
    """[T] int64 over the bytes of rows [T, ...]; NaN payloads count like any other byte."""
    data = torch.cat([r.contiguous().flatten(1).view(torch.uint8) for r in rows], -1).long()
    index = torch.arange(1, data.shape[1] + 1, device=data.device)
    weight = index * 0x9E3779B97F4A7C1 + 12345
    return ((data + 1) * weight).sum(-1)


class Places:
    """What was put at each address of one store: chain, position (-1: nothing yet), bytes."""

    def __init__(self, name: str, *shape: int, device="cpu") -> None:
        self.name = name
        self.chain = torch.zeros(shape, dtype=torch.int64, device=device)
        self.position = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.bytes = torch.zeros(shape, dtype=torch.int64, device=device)

    def put(self, address, chains, positions, sums) -> None:
        self.chain[address], self.position[address] = chains, positions
        self.bytes[address] = sums


class Read(NamedTuple):
    """Rows that came out of a store: its places, their addresses and checksums [n]."""

    places: Places
    row: int | None
    address: torch.Tensor
    sums: torch.Tensor


@dataclass
class Fresh:
    """Tokens of the batch under way, [T]; padding (row 0) included."""

    batch: Batch
    chains: torch.Tensor
    tokens: torch.Tensor


class DebugTags:
    """Wraps the stores' readers and writers at layer 0. One instance a pool."""

    def __init__(self, seg: Segments, max_context: int) -> None:
        w = seg.windows
        self.seg, self.n_sink, self.n_recent = seg, w.windows.n_sink, w.windows.n_recent
        rows, self.cache_rows = len(w.recent_start), len(seg.sinks.tag)
        self.slots = Places("history slot", seg.history.num_slots)
        self.block = seg.spec.block
        self.sink = Places("sink row", rows, self.n_sink)
        self.ring = Places("ring row", rows, self.n_recent)
        self.cache = Places("sink-cache row", self.cache_rows)
        self.cache_slot = torch.full((self.cache_rows,), -1, dtype=torch.int64)
        self.token = torch.zeros(seg.history.num_slots, dtype=torch.int64)
        self.row_chain = torch.zeros(rows, max_context, dtype=torch.int64)
        self.row_token = torch.zeros(rows, max_context, dtype=torch.int64)
        self.row_length = [0] * rows
        self.row_start = [0] * rows
        self.reads: list[Read] | None = None
        self.fresh: Fresh | None = None
        self.checked_steps = self.checked_tokens = 0
        self._wrap()

    def arm(self) -> None:
        """Nothing to wait for: every read is watched from the start."""

    def stats(self) -> dict[str, int]:
        return {"every": 1} | {n: getattr(self, n) for n in ("checked_steps", "checked_tokens")}

    # -- what the stores are told and what they return ------------------------------------------

    def _wrap(self) -> None:
        seg = self.seg
        for store, name, seen in (
            (seg.history, "read", self._history_read),
            (seg.windows, "read_sink", self._sink_read),
            (seg.windows, "read_recent", self._ring_read),
            (seg.history, "write", self._history_written),
            (seg.windows, "write", self._window_written),
            (seg.sinks, "write", self._cache_written),
        ):
            setattr(store, name, _observed(getattr(store, name), seen))

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
        fresh, sums = self.fresh, self._coded_sums(slots, k, v)
        chains, positions, tokens = fresh.chains, fresh.batch.positions, fresh.tokens
        if self.block > 1:
            last = int((fresh.batch.slots == slots[-1]).nonzero()[0])
            row, end = int(fresh.batch.token_rows[last]), int(positions[last]) + 1
            if end % self.block or len(slots) != self.block:
                raise OwnershipError(f"request row {row} sealed {len(slots)} tokens up to {end}")
            positions = torch.arange(end - self.block, end)
            chains, tokens = self.row_chain[row, positions], self.row_token[row, positions]
        self.slots.put(slots, chains, positions, sums)
        self.token[slots] = tokens

    def _coded_sums(self, slots: torch.Tensor, k: Rows, v: Rows) -> torch.Tensor:
        sums = coded_sums(k, v)
        if self.block > 1:
            sums += checksum(self.seg.history.channels[0][slots // self.block])
        return sums

    def _window_written(self, _result, _rows, _positions, _ends, k, v) -> None:
        batch, dtype = self.fresh.batch, self.seg.windows.sink_k[0].dtype
        sums = checksum(k.to(dtype), v.to(dtype))
        rows, positions = batch.token_rows, batch.positions
        sink = (positions < self.n_sink).nonzero().squeeze(-1)
        ring = (positions >= batch.ends - self.n_recent).nonzero().squeeze(-1)
        for places, part, index in (
            (self.sink, sink, positions),
            (self.ring, ring, positions % self.n_recent),
        ):
            where = (rows[part], index[part])
            places.put(where, self.fresh.chains[part], positions[part], sums[part])

    def _cache_written(self, _result, slots, k, v) -> None:
        fresh, dtype = self.fresh, self.seg.sinks.k[0].dtype
        index = {slot: i for i, slot in enumerate(fresh.batch.slots.tolist())}
        mine = torch.tensor([index[s] for s in slots.tolist()], dtype=torch.int64)
        address = slots % self.cache_rows
        sums = checksum(k.to(dtype), v.to(dtype))
        self.cache.put(address, fresh.chains[mine], fresh.batch.positions[mine], sums)
        self.cache_slot[address] = slots

    # -- life of a request -----------------------------------------------------------------------

    def start(self, row: int, slots: torch.Tensor) -> None:
        """Row ``row`` was handed to a request whose cached prefix is in ``slots`` [P]. Call after
        its sinks were restored."""
        expected = torch.tensor(chain(self.token[slots].tolist()), dtype=torch.int64)
        _compare(self.slots, row, None, slots, torch.arange(len(slots)), expected)
        self.row_chain[row, : len(slots)] = expected
        self.row_token[row, : len(slots)] = self.token[slots]
        self.row_length[row] = self.row_start[row] = len(slots)
        self._restored(row, slots[: self.n_sink])

    def _restored(self, row: int, slots: torch.Tensor) -> None:
        """Record the sink rows that a cached prefix must have given to ``row``."""
        if not len(slots):
            return
        address, positions = slots % self.cache_rows, torch.arange(len(slots))
        hit = self.cache_slot[address] == slots
        chains = self.row_chain[row, : len(slots)]
        _compare(self.cache, row, None, address[hit], positions[hit], chains[hit])
        dtype = self.seg.windows.sink_k[0].dtype
        decoded = (x.to(dtype) for x in read_history(self.seg, 0, slots, positions))
        sums = torch.where(hit, self.cache.bytes[address], checksum(*decoded))
        self.sink.put((row, positions), chains, positions, sums)

    def begin(self, batch: Batch, tokens: torch.Tensor, req_to_token: torch.Tensor) -> None:
        """Before layer 0: the prefix slots of every request hold its tokens. tokens [T] int."""
        tokens = tokens.long()
        chains = torch.zeros_like(tokens)
        for row, start, prefix, end in _requests(batch):
            if row == 0:
                continue
            if prefix > self.row_length[row]:
                raise OwnershipError(
                    f"request row {row} continues at position {prefix}, but only "
                    f"{self.row_length[row]} of its tokens were seen"
                )
            # Tokens beyond the prefix were written and given up: they overwrote older ring rows.
            lost = self.row_length[row] - self.n_recent if prefix < self.row_length[row] else 0
            self.row_start[row] = max(self.row_start[row], min(lost, prefix))
            coded = prefix - prefix % self.block
            slots = req_to_token[row, :coded].long()
            expected = self.row_chain[row, :prefix]
            _compare(self.slots, row, None, slots, torch.arange(coded), expected[:coded])
            previous = int(expected[-1]) if prefix else _ROOT
            mine = slice(start, start + end - prefix)
            chains[mine] = torch.tensor(chain(tokens[mine].tolist(), previous, prefix))
            self.row_chain[row, prefix:end] = chains[mine]
            self.row_token[row, prefix:end] = tokens[mine]
            self.row_length[row] = end
        self.fresh, self.reads = Fresh(batch, chains, tokens), []

    def check_reads(self) -> None:
        """After layer 0's attention and before its stores: what was really read."""
        reads, self.reads = self.reads, None
        for row, _, prefix, _ in _requests(self.fresh.batch):
            mine, n = [], 0
            while n < prefix and reads:
                mine.append(reads.pop(0))
                n += len(mine[-1].address)
            if row:
                self._check_request(row, prefix, mine)
        if reads:
            raise OwnershipError(f"{len(reads)} reads of {reads[0].places.name}s by no request")
        self.checked_steps += 1

    def _check_request(self, row: int, prefix: int, reads: list[Read]) -> None:
        low = max(self.row_start[row], prefix + 1 - self.n_recent)
        first_exact = max(self.n_sink, low + -low % self.block)
        seen = [torch.empty(0, dtype=torch.int64)]
        for read in reads:
            positions = self._check_read(row, read)
            for p in (int(positions.min()), int(positions.max())):
                expected = self.sink if p < self.n_sink else self.ring
                if self.n_sink <= p < first_exact:
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
        self.checked_tokens += prefix

    def _check_read(self, row: int, read: Read) -> torch.Tensor:
        """Positions [n] that one read claims, after checking identity and bytes."""
        if read.row not in (None, row):
            raise OwnershipError(f"request row {row} read the {read.places.name}s of {read.row}")
        places, where = read.places, read.address
        if places is self.slots:
            positions = places.position[where].clamp_min(0)
        else:
            positions = read.address
            where = (row, positions % places.chain.shape[1])
        expected = self.row_chain[row, positions]
        _compare(places, row, read.row, where, positions, expected, read.sums)
        return positions


def coded_sums(k: Rows, v: Rows) -> torch.Tensor:
    return checksum(k.packed, k.meta, v.packed, v.meta)


def _observed(original, seen):
    """``original(layer, ...)``, followed by ``seen(result, ...)`` at layer 0."""

    def call(layer, *args):
        result = original(layer, *args)
        if layer == 0:
            seen(result, *args)
        return result

    return call


def _requests(batch: Batch):
    """(row, offset in T, prefix length, sequence length) of each request."""
    parts = (batch.rows, batch.starts, batch.prefix_lens, batch.seq_lens)
    return zip(*(x.tolist() for x in parts), strict=True)


def _compare(places, row, place_row, address, positions, chains, sums=None) -> None:
    """Every place must hold the expected position, chain and (if read) bytes."""
    wrong = (places.position[address] != positions) | (places.chain[address] != chains)
    changed = torch.zeros_like(wrong) if sums is None else places.bytes[address] != sums
    if not bool((wrong | changed).any()):
        return
    i = int((wrong | changed).nonzero()[0])
    index = address[1] if isinstance(address, tuple) else address
    held, wanted = int(places.position[address][i]), int(positions[i])
    text = complaint(places, place_row, int(index[i]), held, wanted, bool(wrong[i]))
    raise OwnershipError(f"request row {row}, {text}")


def complaint(places, place_row, index: int, held: int, wanted: int, foreign: bool) -> str:
    """What is wrong with a place where position ``wanted`` should be: it holds a ``foreign`` token
    (of position ``held``, -1: none), or other bytes."""
    where = f"{places.name} {index}" + ("" if place_row is None else f" of row {place_row}")
    what = "no token" if held < 0 else f"position {held} of another sequence"
    if not foreign:
        what = "other bytes than were written for it"
    elif held == wanted:
        what = f"position {held}, but of another sequence"
    return f"position {wanted}: {where} holds {what}"
