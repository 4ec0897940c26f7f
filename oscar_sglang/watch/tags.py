"""``--oscar-debug-tags``: does attention read the tokens it believes it reads?

Beside every place that holds a token (history slot, sink row, ring row, sink-cache row) there is a
record of what was put there:

    chain   one number for the token *and everything before it in its sequence*. Two requests that
            share a prefix agree on it, any other two differ, so it survives prefix sharing and slot
            replacement.
    bytes   checksum of the token's layer-0 row. Layer 0 stands for all: every layer uses the same
            addresses.

Kernels cannot be watched while they read, least of all inside a CUDA graph. So everything happens
between two forwards, where SGLang prepares metadata (on a CPU ``read_tags`` sees the reads too):

    seal    the last forward's tokens get their records: chain, position, checksum of the bytes that
            now lie at their slot, ring, sink and sink-cache rows
    start   a request that takes a row on a cached prefix: its slots must hold one unbroken sequence
            from position 0, its sink rows what the sink cache holds, and ring rows that it takes
            over from another row be those of its prefix
    check   in every ``every``-th step: at every address of every request's context, identity and
            bytes must be those of its own tokens, and the kernels, run on the cache as it is, must
            read the same rows as the reference (``probe``)
    begin   what the coming forward will write

A chain is a running sum of hashes of (token, position), which is parallel where a chain of hashes
is not. A row keeps the chain of its last token only; earlier ones are summed up again from the
slots' tokens, so that a foreign token anywhere changes the last one. Addresses and boundaries are
computed here and not asked from the code under test. Nothing but a check waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels.codec import Rows
from ..kernels.reference import Segments, first_exact
from ..pool.watching import Watch
from .places import Flat, OwnershipError, Places, checksum

if TYPE_CHECKING:
    from ..pool.parking import Parking
    from ..pool.prefix_tiles import ExtendPlan
    from ..pool.sglang_types import ForwardBatch

DEFAULT_EVERY = 16
BYTES_PER_SLOT = 32  # of ``slots`` and ``token``
# Forwards of warm-up before ``ready``: a few for each captured size. Real ones soon are more.
UNARMED_STEPS = 2000
_SUM_BYTES = 1 << 23  # rows checksummed at a time; each byte is widened to 8


class Fresh(NamedTuple):
    """What the forward under way writes, [T]. Addresses of rows that it does not write are the
    padding row's first, which nobody reads. ``begun``: earlier slots of blocks that it may seal."""

    rows: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    chains: torch.Tensor
    positions: torch.Tensor
    sink: torch.Tensor
    ring: torch.Tensor
    cache: torch.Tensor
    begun: torch.Tensor


class Tags(Watch):
    """A pool's ``Watch``, on any device; silent until ``ready``: what graph capture and warm-up run
    is no request."""

    def __init__(self, seg: Segments, req_to_token: torch.Tensor, every: int) -> None:
        w, device = seg.windows, req_to_token.device
        self.seg, self.table, self.every, self.device = seg, req_to_token, every, device
        self.n_sink, self.n_recent = w.windows.n_sink, w.windows.n_recent
        rows, self.cache_rows, self.block = len(w.recent_start), len(seg.sinks.tag), seg.spec.block

        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        slots = seg.history.num_slots
        sinks, ring = (
            (k[0].flatten(0, 1), v[0].flatten(0, 1))
            for k, v in ((w.sink_k, w.sink_v), (w.recent_k, w.recent_v))
        )
        self.slots = Places("history slot", slots, 0, (), device)
        self.sink = Places("sink row", rows * self.n_sink, self.n_sink, sinks, device)
        self.ring = Places("ring row", rows * self.n_recent, self.n_recent, ring, device)
        # The last one takes what no row of the cache takes.
        cached = seg.sinks.k[0], seg.sinks.v[0]
        self.cache = Places("sink-cache row", self.cache_rows + 1, 0, cached, device)
        self.cache_slot = zeros(self.cache_rows + 1) - 1
        self.token = zeros(slots)
        self.row_chain, self.row_length, self.row_start = zeros(rows), zeros(rows), zeros(rows)
        self.fresh: Fresh | None = None
        # Whose rings rows take over: the pool's Parking, None where rings end with their requests.
        self.parking: Parking | None = None
        # On a GPU: runs the kernels on what they are about to read, gives the requests compared.
        self.probe: Callable[..., int] = lambda *_: 0
        self.armed = self.watching = False
        self.unarmed_steps = 0
        self.steps = self.checked_steps = self.checked_tokens = self.probed_requests = 0

    # -- pool.watching.Watch ---------------------------------------------------------------------

    def ready(self) -> None:
        self.armed = True

    def stats(self) -> dict[str, Any]:
        names = ("every", "steps", "checked_steps", "checked_tokens", "probed_requests")
        return {"debug_tags": {name: getattr(self, name) for name in names}}

    def before(self) -> None:
        self.watching = self._live()
        if self.watching:
            self.seal()

    def begins(
        self, fb: ForwardBatch, started: torch.Tensor | None, plan: ExtendPlan | None = None
    ) -> None:
        if not self.watching:
            return
        if started is None:
            total = fb.batch_size - getattr(fb, "num_padding", 0)  # of a graph replay's view
            rows, ends = fb.req_pool_indices[:total].long(), fb.seq_lens[:total].long()
            prefix = ends - 1
        else:
            total = fb.extend_num_tokens
            rows, ends = fb.req_pool_indices.long(), fb.seq_lens.long()
            prefix = fb.extend_prefix_lens.long()
            self.start(rows, prefix, started, list(fb.extend_prefix_lens_cpu))
        self.steps += 1
        if self.steps % self.every == 0:
            self.check(rows, prefix)
            self.probed_requests += self.probe(rows, prefix, plan)
        self.begin(rows, prefix, ends, fb.input_ids[:total], fb.out_cache_loc[:total])

    def _live(self) -> bool:
        """Whether the step that begins is a request's. Raises OwnershipError where ``ready`` was
        forgotten: a server would say that tags are on while nothing is checked."""
        self.unarmed_steps += not self.armed
        if self.unarmed_steps > UNARMED_STEPS:
            raise OwnershipError(
                f"--oscar-debug-tags is on, but nothing has been checked in {UNARMED_STEPS} steps: "
                "the checks were never armed (oscar_sglang.plugin.metrics.after_init has not run); "
                "reinstall oscar-sglang, or drop the flag"
            )
        return self.armed

    # -- records ---------------------------------------------------------------------------------

    def _sums(self, places: Places, address: torch.Tensor) -> torch.Tensor:
        """Checksums [n] of what now lies at ``address`` [n]."""
        history, rows = self.seg.history, places.rows
        size = history.layouts[0].bytes_per_slot
        if rows:
            size = 2 * rows[0][0].numel() * rows[0].element_size()
        sums = [torch.empty(0, dtype=torch.int64, device=self.device)]
        for part in address.split(max(1, _SUM_BYTES // size)):
            if rows:
                sums.append(checksum(*(x[part.clamp_max(len(x) - 1)] for x in rows)))
            else:
                sums.append(self._coded_sums(part, *history.read(0, part)))
        return torch.cat(sums)

    def _coded_sums(self, slots: torch.Tensor, k: Rows, v: Rows) -> torch.Tensor:
        """Of rows of history, with what a block codec keeps for their channels."""
        sums = checksum(k.packed, k.meta, v.packed, v.meta)
        if self.block > 1:
            sums += checksum(self.seg.history.channels[0][slots // self.block])
        return sums

    def _put_sums(self, places: Places, address: torch.Tensor) -> torch.Tensor:
        """Checksums [n] of what the last forward has put at ``address`` [n]."""
        return self._sums(places, address)

    def seal(self) -> None:
        """Before anything of the next step is written."""
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            return
        for places, address in (
            (self.slots, fresh.slots),
            (self.sink, fresh.sink),
            (self.ring, fresh.ring),
            (self.cache, fresh.cache),
        ):
            places.put(address, fresh.chains, fresh.positions, self._put_sums(places, address))
        # A block codec writes a token's codes with the last of its block.
        self.slots.bytes[fresh.begun] = self._put_sums(self.slots, fresh.begun)
        self.token[fresh.slots] = fresh.tokens
        self.cache_slot[fresh.cache] = fresh.slots

    def start(self, rows, prefix, started, prefix_cpu: list[int]) -> None:
        """rows, prefix, started [B]: of an extend batch, after sinks were restored."""
        length, begun = self.row_length[rows], self.row_start[rows]
        # Tokens beyond the prefix were written and given up: they overwrote older ring rows.
        cut = ~started & (prefix < length)
        lost = torch.minimum(torch.maximum(begun, length - self.n_recent), prefix)
        begun = torch.where(cut, torch.maximum(begun, lost), begun)
        source, first = self._taken_over(rows, prefix)
        self.row_start[rows] = torch.where(started, first, begun)
        self.row_length[rows] = torch.where(started | cut, prefix, length)
        last = torch.zeros_like(prefix)
        if total := sum(prefix_cpu):
            flat = Flat.of(torch.zeros_like(prefix), prefix, total)
            slots = self.table[rows[flat.request], flat.position].long()
            chains = flat.chains(self.token[slots], 0)
            mine, where = (started | cut)[flat.request], (rows[flat.request], flat.position)
            self._compare(self.slots, where, slots, chains, mine)
            end = prefix.cumsum(0) - 1
            last = torch.where(prefix > 0, chains[end.clamp_min(0)], 0)
            self._restored(rows, prefix, started)
            self._copied(rows, prefix, started & (source > 0), source, first)
        self.row_chain[rows] = torch.where(started | cut, last, self.row_chain[rows])

    def _taken_over(self, rows, prefix) -> tuple[torch.Tensor, torch.Tensor]:
        """Whose ring each of ``rows`` [B] takes over if it starts (0: nobody's), and the position
        it is exact from."""
        if self.parking is None:
            return torch.zeros_like(prefix), prefix
        both = self.parking.source, self.parking.low
        source, low = (x.to(self.device)[rows] for x in both)
        first = torch.maximum(low, prefix - self.n_recent)
        return source, torch.where(source > 0, first, prefix)

    def _copied(self, rows, prefix, taken, source, first) -> None:
        """Record the ring rows that requests took over, which must be those of their own prefix."""
        place = torch.arange(self.n_recent, device=self.device)
        position = prefix[:, None] - 1 - (prefix[:, None] - 1 - place) % self.n_recent
        mine = taken[:, None] & (position >= first[:, None])
        slots = torch.where(mine, self.table[rows[:, None], position.clamp_min(0)].long(), 0)
        old, new = (
            torch.where(mine, row[:, None] * self.n_recent + place, 0).flatten()
            for row in (source, rows)
        )
        row, chains = rows[:, None].expand_as(mine).flatten(), self.slots.chain[slots].flatten()
        position, sums = position.flatten(), self._sums(self.ring, new)
        self._compare(self.ring, (row, position), old, chains, mine.flatten(), sums)
        self.ring.put(new, chains, position, sums)

    def _restored(self, rows, prefix, started) -> None:
        """Record the sink rows that requests got from their prefix; from the sink cache where it
        has them, decoded where not."""
        n = min(self.n_sink, self.table.shape[1])
        position = torch.arange(n, device=self.device).expand(len(rows), n)
        given = (started[:, None] & (position < prefix[:, None])).flatten()
        slots = torch.where(given, self.table[rows, :n].long().flatten(), 0)
        row = rows[:, None].expand(-1, n).flatten()
        position = position.flatten()
        address = torch.where(given, row * self.n_sink + position, 0)
        cached, chains = slots % self.cache_rows, self.slots.chain[slots]
        hit = given & (self.cache_slot[cached] == slots)
        sums = self._sums(self.sink, address)
        self._compare(self.cache, (row, position), cached, chains, hit, sums)
        sums = self._restored_sums(sums, slots, given, hit)
        self.sink.put(address, chains, position, sums)

    def _restored_sums(self, sums, slots, given, hit) -> torch.Tensor:
        """``sums`` of restored rows, all [B * n_sink], where none was a ``hit`` as they should be;
        kernels round their own way."""
        return sums

    def begin(self, rows, prefix, ends, tokens, slots) -> None:
        """rows, prefix, ends [B], tokens, slots [T] of the coming forward."""
        tokens, slots = tokens.long().clone(), slots.long().clone()  # SGLang's own buffers move on
        flat = Flat.of(prefix, ends - prefix, len(slots))
        known = self.row_length[rows] == prefix
        previous = torch.where(known, self.row_chain[rows], -1)  # -1: no check will agree
        chains = flat.chains(tokens, previous[flat.request])
        position, row = flat.position, rows[flat.request]
        in_sink = position < self.n_sink
        in_ring = position >= ends[flat.request] - self.n_recent
        self.fresh = Fresh(
            row,
            slots,
            tokens,
            chains,
            position,
            torch.where(in_sink, row * self.n_sink + position, 0),
            torch.where(in_ring, row * self.n_recent + position % self.n_recent, 0),
            self._cache_rows_of(slots, in_sink & (slots > 0)),
            self._begun(rows, prefix),
        )
        self.row_chain[rows] = chains[(ends - prefix).cumsum(0) - 1]
        self.row_length[rows] = ends

    def _cache_rows_of(self, slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Sink-cache row of each slot; of those that share one the last gets it."""
        order = torch.arange(len(slots), device=self.device)
        row = torch.where(wanted, slots % self.cache_rows, self.cache_rows)
        last = torch.zeros_like(self.cache_slot).scatter_reduce(0, row, order, "amax")
        return torch.where(last[row] == order, row, self.cache_rows)

    def _begun(self, rows: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Slots [B * block] of the tokens of unfinished blocks; 0 where there is none."""
        if self.block == 1:
            return rows[:0]
        first = prefix - prefix % self.block
        position = first[:, None] + torch.arange(self.block, device=self.device)
        slots = self.table[rows[:, None], position.clamp_max(self.table.shape[1] - 1)].long()
        return torch.where(position < prefix[:, None], slots, 0).flatten()

    # -- checks ----------------------------------------------------------------------------------

    def boundary(self, prefix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """First position [B] after the sink that the next token of a request reads exactly."""
        start = self.row_start[rows]
        return first_exact(prefix + 1, start, self.n_sink, self.n_recent, self.block)

    def check(self, rows: torch.Tensor, prefix: torch.Tensor) -> None:
        """rows, prefix [B]: everything that attention is about to read of the cache."""
        real = (rows > 0) & (prefix > 0)
        rows, prefix = rows[real], prefix[real]
        self._check_rows(rows, prefix)
        total = int(prefix.sum())
        flat = Flat.of(torch.zeros_like(prefix), prefix, total)
        row, position = rows[flat.request], flat.position
        slots = self.table[row, position].long()
        chains = flat.chains(self.token[slots], 0)
        everywhere = torch.ones_like(slots, dtype=torch.bool)
        self._compare(self.slots, (row, position), slots, chains, everywhere)
        if total:
            end = prefix.cumsum(0) - 1
            broken = chains[end] != self.row_chain[rows]
            self._raise_if(broken, lambda i: f"its {int(prefix[i])} slots are another's", rows)
        self._check_bytes(row, position, slots, chains, self.boundary(prefix, rows)[flat.request])
        self.checked_steps += 1
        self.checked_tokens += total

    def _check_bytes(self, row, position, slots, chains, exact) -> None:
        """All [n]: at the place of its segment every token has its own bytes."""
        for places, part, address in (
            (self.sink, position < self.n_sink, row * self.n_sink + position),
            (self.slots, (position >= self.n_sink) & (position < exact), slots),
            (self.ring, position >= exact, row * self.n_recent + position % self.n_recent),
        ):
            part = part.nonzero().squeeze(-1)
            address, everywhere = address[part], torch.ones_like(part, dtype=torch.bool)
            sums, at = self._sums(places, address), (row[part], position[part])
            self._compare(places, at, address, chains[part], everywhere, sums)

    def _check_rows(self, rows: torch.Tensor, prefix: torch.Tensor) -> None:
        seen, begun = self.row_length[rows], self.row_start[rows]

        def unseen(i: int) -> str:
            return (
                f"continues at position {int(prefix[i])}, but {int(seen[i])} of its tokens were "
                "seen"
            )

        self._raise_if(seen != prefix, unseen, rows)
        ring = self.seg.windows.recent_start[rows]
        text = "its ring begins at position {}, expected {}".format
        self._raise_if(ring != begun, lambda i: text(int(ring[i]), int(begun[i])), rows)

    def _compare(self, places, where, address, chains, mask, sums=None) -> None:
        """Wherever ``mask`` [n] says so, the place at ``address`` holds the token at ``where``
        (row, position), and the bytes that were found there are those of its record."""
        row, position = where
        identity = (places.position[address] != position) | (places.chain[address] != chains)
        wrong = identity if sums is None else identity | (places.bytes[address] != sums)

        def what(i: int) -> str:
            return places.complaint(int(address[i]), int(position[i]), bool(identity[i]))

        self._raise_if(wrong & mask, what, row)

    def _raise_if(self, wrong: torch.Tensor, what, rows: torch.Tensor) -> None:
        if not bool(wrong.any()):
            return
        i = int(wrong.nonzero()[0])
        raise OwnershipError(f"request row {int(rows[i])}: {what(i)} ({int(wrong.sum())} in all)")
