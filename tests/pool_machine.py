"""A small scheduler over SGLang's own allocator, request rows and radix tree, and over our stores.

Every forward is checked twice: by ``DebugTags``, and against a dense computation that is told only
which tokens a request has, where its prefix hit ended and which sink slots the sink cache still
held; it knows nothing of slots, rings or rows.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from oscar_sglang.debug_tags import DebugTags, chain
from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.codec import CODECS, LayerParams
from oscar_sglang.kernels.layout import HistoryLayout, WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore

D, ROWS, CONTEXT, BANK = 16, 4, 64, 1024
WINDOWS = WindowLayout(n_sink=4, n_recent=8)
POOL = int(1.2 * ROWS * CONTEXT)
SCALE = D**-0.5
# Two families of prompts that part inside the sink, the history and the recent window.
FORKS = (2, 6, 20, 40)


@dataclass
class Request:
    """Also what SGLang's radix cache wants of its ``Req``."""

    wanted: list[int]  # tokens to prefill; grows by decoding
    limit: int
    done: int = 0
    hit: int = 0
    lost_sinks: list[int] = field(default_factory=list)
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    last_node: object = None
    extra_key: None = None
    priority: int = 0
    inflight_middle_chunks: int = 0
    kv_committed_len: int = 0
    output_ids: array = field(default_factory=lambda: array("q"))

    @property
    def origin_input_ids(self) -> array:
        return array("q", self.wanted[: self.done])

    get_fill_ids = origin_input_ids.fget


class Machine:
    """``Machine(seed)``, then operations by name; ``check_idle`` ends it."""

    OPERATIONS = ("start",) * 4 + ("forward",) * 12 + ("finish",) * 3 + ("publish",) * 3
    OPERATIONS += ("abort", "retract", "evict", "flush", "poison")

    def __init__(self, seed: int = 0, cache_rows: int = 24, exact: bool = True) -> None:
        self.rng = random.Random(seed)
        g = torch.Generator().manual_seed(1)
        q = torch.linalg.qr(torch.randn(2, 1, D, D, generator=g, dtype=torch.float64))[0].float()
        params = LayerParams(q[0], q[1], (torch.randn(1, D, D, generator=g) * 0.02).triu(1))
        layout = HistoryLayout(1, D)
        self.seg = reference.Segments(
            CODECS["feedback"],
            [params],
            HistoryStore(layout, 1, POOL + 1, "cpu"),
            WindowStore(WINDOWS, layout, 1, ROWS + 1, torch.float32, "cpu"),
            SinkCache(layout, 1, cache_rows, torch.float32, "cpu"),
        )
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.slots = TokenToKVPoolAllocator(POOL, torch.float32, "cpu", None, False)
        self.tree = RadixCache.create_simulated(mock_allocator=self.slots)
        self.tree.req_to_token_pool = self.rows
        self.tags = DebugTags(self.seg, CONTEXT)
        self.scratch = torch.full((2, 13, 1, D), torch.nan)
        self.bank = torch.randn(3, BANK, 1, D, generator=g)
        self.coded = self._coded_bank(params)
        self.cached_sinks: dict[int, int] = {}  # sink-cache row -> slot, kept independently
        self.exact = exact
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts = dict.fromkeys(
            ("operations", "forwards", "hits", "evicted", "retracted", "lost_sinks"), 0
        )

    def _coded_bank(self, params: LayerParams) -> list[torch.Tensor]:
        k, v = codec.rotate(self.bank[1], params.r_k), codec.rotate(self.bank[2], params.r_v)
        k = codec.decode_rows(codec.encode_k(self.seg.spec, params, k))
        v = codec.decode_rows(codec.encode_v(self.seg.spec, v))
        return [codec.rotate(k, params.r_k.mT), codec.rotate(v, params.r_v.mT)]

    # -- operations --------------------------------------------------------------------------

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.do(self.rng.choice(self.OPERATIONS))

    def do(self, name: str) -> None:
        self.counts["operations"] += 1
        getattr(self, name)()

    def prompt(self) -> list[int]:
        base = [self.rng.randrange(2)] * CONTEXT
        for fork in FORKS:
            base[fork:] = [self.rng.randrange(2) + 2 * (fork % 5)] * (CONTEXT - fork)
        return base[: self.rng.randrange(1, CONTEXT - 8)]

    def start(self) -> None:
        if not self.rows.free_slots:
            return self.finish()
        if self.waiting:
            request = self.waiting.pop()
        else:
            wanted = self.prompt()
            request = Request(wanted, min(CONTEXT, len(wanted) + self.rng.randrange(1, 24)))
        key = RadixKey(array("q", request.wanted[:-1]))
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        self.rows.alloc([request])
        hit = len(match.device_indices)
        request.done = request.hit = request.cache_protected_len = hit
        request.last_node = match.last_device_node
        self.tree.inc_lock_ref(request.last_node)
        self.rows.req_to_token[request.req_pool_idx, :hit] = match.device_indices.int()
        self.running.append(request)
        self.counts["hits"] += hit > 0
        # The backend sees a request in its first forward; until then nothing may be read.
        request.new = True

    def forward(self) -> None:
        """Decodes, chunks on a prefix and fresh prompts of a random subset, as one batch."""
        self.rng.shuffle(self.running)
        work = []
        for request in self.running[: self.rng.randrange(1, ROWS + 1)]:
            if request.done == len(request.wanted):
                if request.done >= request.limit:
                    continue
                request.wanted.append(self.rng.randrange(3))
            n = len(request.wanted) - request.done
            n = self.rng.choice((n, self.rng.randrange(1, n + 1)))
            work.append((request, n))
        given = []
        for request, n in work:
            slots = self._allocate(n, [r for r, *_ in work]) if request in self.running else None
            if slots is not None:
                given.append((request, n, slots))
        if given:
            self._forward(given)

    def finish(self) -> None:
        done = [r for r in self.running if r.done >= len(r.wanted) and not vars(r).get("new")]
        if done:
            self._release(self.rng.choice(done), insert=True)

    def abort(self) -> None:
        if self.running:
            self._release(self.rng.choice(self.running), insert=self.rng.random() < 0.5)

    def retract(self, keep=()) -> None:
        victims = [r for r in self.running if r not in keep]
        if victims:
            request = self.rng.choice(victims)
            self._release(request, insert=self.rng.random() < 0.5)
            self.waiting.append(Request(request.wanted, request.limit))
            self.counts["retracted"] += 1

    def publish(self) -> None:
        """SGLang caches an unfinished prompt after each chunk; its slots may be replaced."""
        ready = [r for r in self.running if r.done > r.hit]
        if ready:
            self.tree.cache_unfinished_req(self.rng.choice(ready), chunked=True)

    def evict(self) -> None:
        wanted = EvictParams(num_tokens=self.rng.randrange(1, 40))
        self.counts["evicted"] += self.tree.evict(wanted).num_tokens_evicted

    def flush(self) -> None:
        if not self.running:
            self.tree.reset()
            self.slots.clear()

    def poison(self) -> None:
        """What nobody owns may hold anything: code 3 and NaN metadata, NaN windows."""
        free = self.slots.free_pages
        for view in self.seg.history._views(0):
            view[free // 16, ..., free % 16, :] = 3 if view.dtype == torch.uint8 else torch.nan
        rows, windows = self.rows.free_slots, self.seg.windows
        for store in (windows.sink_k, windows.sink_v, windows.recent_k, windows.recent_v):
            store[0][rows] = torch.nan

    def check_idle(self) -> None:
        """After everybody left and the tree was emptied every slot and row is free, once."""
        for request in list(self.running):
            self._release(request, insert=False)
        self.tree.evict(EvictParams(num_tokens=POOL))
        assert sorted(self.slots.free_pages.tolist()) == list(range(1, POOL + 1))
        assert len(self.rows.free_slots) == ROWS

    # -- inside -------------------------------------------------------------------------------

    def _allocate(self, n: int, keep: list[Request]) -> torch.Tensor | None:
        """Free slots, else evicted ones, else those of a retracted request."""
        while n > self.slots.available_size():
            self.tree.evict(EvictParams(num_tokens=n - self.slots.available_size()))
            if n <= self.slots.available_size():
                break
            before = len(self.running)
            self.retract(keep)
            if len(self.running) == before:
                return None
        return self.slots.alloc(n)

    def _release(self, request: Request, insert: bool) -> None:
        # A prompt that was never computed past its hit has nothing to insert.
        self.tree.cache_finished_req(request, insert, kv_len_to_handle=request.done)
        self.rows.free(request)
        self.running.remove(request)

    def _start_rows(self, given) -> None:
        for request, _, _ in given:
            if not vars(request).pop("new", False):
                continue
            row, hit = request.req_pool_idx, request.done
            slots = self.rows.req_to_token[row, :hit].long()
            request.hit = hit
            held = [self.cached_sinks.get(s % len(self.seg.sinks.tag)) == s for s in slots.tolist()]
            request.lost_sinks = [p for p in range(min(hit, WINDOWS.n_sink)) if not held[p]]
            self.counts["lost_sinks"] += len(request.lost_sinks)
            self.seg.windows.recent_start[row] = hit
            if hit:
                reference.restore_sinks(self.seg, row, slots[: WINDOWS.n_sink])
            self.tags.start(row, slots)

    def _forward(self, given) -> None:
        self._start_rows(given)
        rows = torch.tensor([r.req_pool_idx for r, *_ in given])
        prefix = torch.tensor([r.done for r, *_ in given])
        end = prefix + torch.tensor([n for _, n, _ in given])
        slots = torch.cat([s for *_, s in given])
        table = self.rows.req_to_token
        for request, n, mine in given:
            table[request.req_pool_idx, request.done : request.done + n] = mine.int()
        tokens = [t for r, n, _ in given for t in r.wanted[r.done : r.done + n]]
        index = [torch.tensor(chain(r.wanted)) % BANK for r, *_ in given]
        fresh = torch.cat(
            [i[r.done : r.done + n] for i, (r, n, _) in zip(index, given, strict=True)]
        )
        batch = reference.plan_batch(self.seg, rows, prefix, end, slots)
        for position, slot in zip(batch.positions.tolist(), slots.tolist(), strict=True):
            if position < WINDOWS.n_sink:
                self.cached_sinks[slot % len(self.seg.sinks.tag)] = slot
        self.tags.begin(batch, torch.tensor(tokens), table)
        q, k, v = self.bank[:, fresh]
        out = reference.attention(self.seg, 0, batch, q, k, v, table, self.scratch, SCALE)
        self.tags.check_reads()
        reference.store(self.seg, 0, batch, k, v)
        outs = out.split([n for _, n, _ in given])
        for i, (request, n, _), got in zip(index, given, outs, strict=True):
            if self.exact:
                expected = self._dense(request, i, n)
                error = (got - expected).norm() / expected.norm()
                assert error < 1e-4, f"row {request.req_pool_idx}: relative error {error:.2g}"
            request.done += n
            request.kv_committed_len = request.done
        self.counts["forwards"] += 1

    def _dense(self, request: Request, index: torch.Tensor, n: int) -> torch.Tensor:
        """Rows done..done+n-1 over explicitly chosen exact or decoded rows, [n, 1, D]."""
        first, end = request.done, request.done + n
        coded = torch.zeros(end, dtype=torch.bool)
        recent = max(request.hit, first + 1 - WINDOWS.n_recent)
        coded[WINDOWS.n_sink : min(first, recent)] = True
        coded[request.lost_sinks] = True
        ids = index[:end]
        k, v = (
            torch.where(coded[:, None, None], c[ids], e[ids])[:, 0]
            for c, e in zip(self.coded, self.bank[1:], strict=True)
        )
        logits = (self.bank[0, ids[first:], 0] @ k.T) * SCALE
        future = torch.arange(end)[None] > torch.arange(first, end)[:, None]
        return (logits.masked_fill(future, -torch.inf).softmax(-1) @ v)[:, None]


def report(machines: list[Machine]) -> dict[str, int]:
    """Counts of all machines, summed."""
    total = SimpleNamespace(tokens=sum(m.tags.checked_tokens for m in machines))
    counts = {k: sum(m.counts[k] for m in machines) for k in machines[0].counts}
    return {**counts, "reads_checked": total.tokens}
