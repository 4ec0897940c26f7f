"""A small scheduler over SGLang's own allocator, request rows and radix tree, and over our stores.

Every forward is checked twice: by ``ReadTags``, and against a dense computation that is told only
which tokens a request has, where its prefix hit ended and which sink slots the sink cache still
held; it knows nothing of slots, rings or rows.

With a page size above 1 slots come from SGLang's paged allocator and prefixes match in whole pages;
lengths grow with the page, so that a request spans several. Codec ``omni`` seals pages of 128.

Long because the scheduler, the caches it keeps apart and the dense check share one state.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from oscar_sglang.kernels import codec, codec_omni, reference
from oscar_sglang.kernels.codec import CODECS, LayerParams, with_rope
from oscar_sglang.kernels.codec_position import Rope
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore
from oscar_sglang.pool.parking import Parking
from oscar_sglang.watch.places import link
from oscar_sglang.watch.read_tags import ReadTags

D, ROWS, BANK = 16, 4, 1024
N_RECENT = 8
SCALE = D**-0.5
# Prompts part inside the sink, the history and the recent window. For a context of 64.
FORKS = (2, 6, 20, 40)


@dataclass
class Request:
    """Also what SGLang's radix cache wants of its ``Req``."""

    wanted: list[int]  # tokens to prefill; grows by decoding
    limit: int
    done: int = 0
    hit: int = 0
    exact_from: int = 0  # ring rows of earlier positions were never there
    overwritten: int = 0  # ring rows of positions below it hold tokens that were given up
    is_cut: bool = False
    lost_sinks: list[int] = field(default_factory=list)
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    lock: object = None
    last_node: object = None
    extra_key: None = None
    cache_salt: None = None
    priority: int = 0

    @property
    def origin_input_ids(self) -> array:
        return array("q", self.wanted[: self.done])

    full_untruncated_fill_ids = origin_input_ids

    @property
    def prefix_len(self) -> int:
        """Read by our own hook, which other tests of the same process may have put in place."""
        return self.hit

    @property
    def req_pool_idx(self) -> int | None:
        return self.kv.req_pool_idx


class Guest:
    """What ``Parking`` reads of SGLang's request."""

    extra_key = cache_salt = None

    def __init__(self, request: Request) -> None:
        self.origin_input_ids, self.output_ids = array("q", request.wanted), array("q")
        self.kv = SimpleNamespace(
            req_pool_idx=request.req_pool_idx,
            kv_committed_len=request.done,
            kv_allocated_len=request.done,
        )
        self.prefix_len = request.hit


class Machine:
    """``Machine(seed)``, then operations by name; ``check_idle`` ends it.

    n_sink  exact first tokens; not a multiple of the page, so that pages straddle the boundary
    park    rings outlive their requests (``pool/parking.py``)
    """

    OPERATIONS = ("start",) * 4 + ("forward",) * 12 + ("finish",) * 3 + ("publish",) * 3
    OPERATIONS += ("abort", "retract", "cut", "evict", "flush", "poison")

    def __init__(
        self,
        seed: int = 0,
        cache_rows: int = 24,
        exact: bool = True,
        page: int = 1,
        n_sink: int = 4,
        codec_name: str = "feedback",
        park: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        spec = CODECS[codec_name]
        self.block = spec.block
        page = max(page, self.block)
        self.page, self.n_sink, self.n_ring = page, n_sink, spec.ring_tokens(N_RECENT)
        self.context = max(64, 3 * page)
        self.pool = int(1.2 * ROWS * self.context) // page * page
        g = torch.Generator().manual_seed(1)
        q = torch.linalg.qr(torch.randn(2, 1, D, D, generator=g, dtype=torch.float64))[0].float()
        factor = (torch.randn(1, D, D, generator=g) * 0.02).triu(1)
        params = LayerParams(q[0], q[1], factor if spec.k_feedback else None)
        layer_spec = spec
        if spec.meta.name == "position":
            layer_spec = with_rope(spec, Rope.of([0.5**i for i in range(D // 2)], D))
            params = params._replace(
                metric=torch.eye(D)[None],
                grid=torch.tensor([-5.0, -4.0, 8 / 255]).repeat(1, 2, 1),
                q_k=q[0],
                mean=torch.randn(1, D, generator=g),
            )
        layout, windows = spec.layout(1, D), WindowLayout(n_sink, self.n_ring)
        self.seg = reference.Segments(
            spec,
            [params],
            HistoryStore(layout, 1, self.pool + page, "cpu"),
            WindowStore(windows, layout, 1, ROWS + 1, torch.float32, "cpu"),
            SinkCache(layout, 1, cache_rows, torch.float32, "cpu"),
            [layer_spec],
        )
        self.rows = ReqToTokenPool(ROWS, self.context, "cpu", False)
        of = (torch.float32, "cpu", None, False)
        if page == 1:
            self.slots = TokenToKVPoolAllocator(self.pool, *of)
        else:
            self.slots = paged.PagedTokenToKVPoolAllocator(self.pool, page, *of)
        self.slots.debug_mode = True  # SGLang's own asserts, too
        self.tree = RadixCache.create_simulated(mock_allocator=self.slots, page_size=page)
        self.tree.req_to_token_pool = self.rows
        self.tags = ReadTags(self.seg, self.rows.req_to_token)
        self.parking = Parking(ROWS + 1, self.n_ring, page) if park else None
        self.tags.parking = self.parking
        self.scratch = torch.full((2, 13 * self.context // 64, 1, D), torch.nan)
        self.bank = torch.randn(3, BANK, 1, D, generator=g)
        self.coded = None if self.block > 1 else self._coded_bank(params)
        self.coded_blocks: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.cached_sinks: dict[int, int] = {}  # sink-cache row -> slot, kept independently
        self.exact = exact
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts = dict.fromkeys(
            ("operations", "forwards", "hits", "evicted", "retracted", "cut", "lost_sinks"), 0
        ) | ({"windows_taken": 0} if park else {})

    def _coded_bank(self, params: LayerParams) -> list[torch.Tensor]:
        """K [positions, tokens, 1, D] and V [tokens, 1, D] as history gives them back; one position
        stands for all where the codec asks for none."""
        k, v = codec.rotate(self.bank[1], params.r_k), codec.rotate(self.bank[2], params.r_v)
        (spec,) = self.seg.specs
        keys = []
        for position in range(self.context if spec.meta.name == "position" else 1):
            at = torch.full((len(k),), position)
            hat = spec.decode_k(params, spec.encode_k(params, k, at), at)
            keys.append(codec.rotate(hat, params.k_back))
        v = spec.decode_v(params, spec.encode_v(params, v))
        return [torch.stack(keys), codec.rotate(v, params.r_v.mT)]

    def _coded(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """K and V of a request's tokens as history gives them back; of a block codec, zeros beyond
        its last whole block."""
        if self.block == 1:
            keys, values = self.coded
            return [keys[torch.arange(len(ids)).clamp_max(len(keys) - 1), ids], values[ids]]
        whole = len(ids) // self.block
        blocks = [
            self._coded_block(b, max(0, self.n_sink - i * self.block))
            for i, b in enumerate(ids[: whole * self.block].view(whole, self.block))
        ]
        rest = torch.zeros(len(ids) % self.block, 1, D)
        return [torch.cat([*parts, rest]) for parts in zip(*blocks, strict=True)] or [rest, rest]

    def _coded_block(self, ids: torch.Tensor, sinks: int) -> list[torch.Tensor]:
        key = (sinks, *ids.tolist())
        if key not in self.coded_blocks:
            (params,) = self.seg.params
            k, v = (
                codec.rotate(x[ids], r)
                for x, r in zip(self.bank[1:], (params.r_k, params.r_v), strict=True)
            )
            k = codec_omni.decode_k(codec_omni.encode_k(k, sinks))
            v = self.seg.spec.decode_v(params, codec_omni.encode_v(v))
            back = [codec.rotate(k, params.r_k.mT), codec.rotate(v, params.r_v.mT)]
            self.coded_blocks[key] = back
        return self.coded_blocks[key]

    # -- operations --------------------------------------------------------------------------

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.do(self.rng.choice(self.OPERATIONS))

    def do(self, name: str) -> None:
        self.counts["operations"] += 1
        getattr(self, name)()

    def prompt(self) -> list[int]:
        length = self.context
        base = [self.rng.randrange(2)] * length
        for fork in FORKS:
            at = fork * length // 64
            base[at:] = [self.rng.randrange(2) + 2 * (fork % 5)] * (length - at)
        return base[: self.rng.randrange(1, length - 8)]

    def start(self) -> None:
        if not self.rows.free_slots:
            return self.finish()
        if self.waiting:
            request = self.waiting.pop()
        else:
            wanted = self.prompt()
            request = Request(wanted, min(self.context, len(wanted) + self.rng.randrange(1, 24)))
        guest = Guest(request)
        tail = self.parking.tail(guest) if self.parking else 0
        key = RadixKey(array("q", request.wanted[: len(request.wanted) - max(1, tail)]))
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        guest.prefix_len = match.device_prefix_len
        if self.parking:
            self.parking.take(self.rows.free_slots, [guest])
        self.rows.alloc([request])
        request.last_node = match.last_device_node
        slots = self.tree.path_device_indices(request.last_node)
        hit = match.device_prefix_len
        request.done = request.hit = request.kv.cache_protected_len = hit
        request.lock = self.tree.lock(request.last_node)
        self.rows.req_to_token[request.req_pool_idx, :hit] = slots.int()
        self.running.append(request)
        self.counts["hits"] += hit > 0
        # The backend sees a request in its first forward; until then nothing may be read.
        request.new = True
        if self.parking:  # as SGLang does: what is taken over is still there
            self._run([request])
            if vars(request).get("new"):
                self._release(request, insert=False)

    def forward(self) -> None:
        """Decodes, chunks on a prefix and fresh prompts of a random subset, as one batch."""
        self.rng.shuffle(self.running)
        self._run(self.running[: self.rng.randrange(1, ROWS + 1)])

    def _run(self, requests: list[Request]) -> None:
        work = []
        for request in requests:
            if request.done == len(request.wanted):
                if request.done >= request.limit:
                    continue
                request.wanted.append(self.rng.randrange(3))
            n = len(request.wanted) - request.done
            n = self.rng.choice((n, self.rng.randrange(1, n + 1)))
            work.append((request, n))
        while work and not self._make_room(work):
            work.pop()
        if work:
            parts = self._allocate(work).split([n for _, n in work])
            self._forward([(r, n, s) for (r, n), s in zip(work, parts, strict=True)])

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

    def cut(self) -> None:
        """The next turn of a session keeps the row, and goes on before the end of the last one; of
        a block codec by a token, which the ring bears: it may unseal a block."""
        ready = [r for r in self.running if self._first_cut(r) < r.done and not vars(r).get("new")]
        if not ready:
            return
        request = self.rng.choice(ready)
        target = self.rng.randrange(self._first_cut(request), request.done)
        target = request.done - 1 if self.block > 1 else target
        whole = -(-target // self.page) * self.page
        if whole < request.done:
            self.tree.free_kv_row(request.kv, [(whole, request.done)])
        lost = min(target, request.done - self.n_ring)
        request.overwritten = max(request.overwritten, lost)
        request.done = request.kv_committed_len = target
        request.is_cut = True
        more = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 24))]
        request.wanted = (request.wanted[:target] + more)[: request.limit]
        self.counts["cut"] += 1

    def _first_cut(self, request: Request) -> int:
        return max(request.hit, request.kv.cache_protected_len)

    def publish(self) -> None:
        """SGLang caches an unfinished prompt after each chunk; its slots may be replaced."""
        ready = [r for r in self.running if r.done > r.hit]
        if ready:
            request = self.rng.choice(ready)
            self.tree.checkpoint(request, up_to=request.done)

    def evict(self) -> None:
        wanted = EvictParams(num_tokens=self.rng.randrange(1, 40))
        self.counts["evicted"] += self.tree.evict(wanted).num_tokens_evicted

    def flush(self) -> None:
        if not self.running:
            self.tree.reset()
            self.slots.clear()

    def poison(self) -> None:
        """What nobody owns may hold anything: code 3 and NaN metadata, NaN windows; the same for
        the rest of a page that a request has begun."""
        free = [(self.slots.free_pages[:, None] * self.page + torch.arange(self.page)).flatten()]
        for request in self.running:
            after = int(self._last_slot(request)) + 1
            first = after if self.block == 1 else after // self.page * self.page  # not sealed yet
            free.append(torch.arange(first, -(-after // self.page) * self.page))
        free = torch.cat(free)
        for channels in self.seg.history.channels:
            channels[free // self.block] = torch.nan
        for view in self.seg.history.views(0):
            view[free // 16, ..., free % 16, :] = 3 if view.dtype == torch.uint8 else torch.nan
        windows, kept = self.seg.windows, self.parking.left() if self.parking else ()
        rows = [row for row in self.rows.free_slots if row not in kept]
        for store in (windows.sink_k, windows.sink_v, windows.recent_k, windows.recent_v):
            store[0][rows] = torch.nan

    def check_idle(self) -> None:
        """After everybody left and the tree was emptied every slot and row is free, once."""
        for request in list(self.running):
            self._release(request, insert=False)
        self.tree.evict(EvictParams(num_tokens=self.pool))
        pages = self.pool // self.page
        assert sorted(self.slots.free_pages.tolist()) == list(range(1, pages + 1))
        assert len(self.rows.free_slots) == ROWS

    # -- inside -------------------------------------------------------------------------------

    def _make_room(self, work: list[tuple[Request, int]]) -> bool:
        """Free slots for a batch, else evicted ones, else those of a retracted request."""
        pages = sum(-(-(r.done + n) // self.page) - -(-r.done // self.page) for r, n in work)
        while (missing := pages * self.page - self.slots.available_size()) > 0:
            if self.tree.evict(EvictParams(num_tokens=missing)).num_tokens_evicted:
                continue
            before = len(self.running)
            self.retract([r for r, _ in work])
            if len(self.running) == before:
                return False
        return True

    def _last_slot(self, request: Request) -> torch.Tensor:
        """-1 before the first token."""
        held = self.rows.req_to_token[request.req_pool_idx, : request.done].long()
        return held[-1] if len(held) else torch.tensor(-1)

    def _allocate(self, work: list[tuple[Request, int]]) -> torch.Tensor:
        """Slots of a batch's fresh tokens, by the calls that SGLang's scheduler makes."""
        total = sum(n for _, n in work)
        if self.page == 1:
            return self.slots.alloc(total)
        prefix = torch.tensor([r.done for r, _ in work])
        end = prefix + torch.tensor([n for _, n in work])
        last = torch.stack([self._last_slot(r) for r, _ in work])
        if total == len(work):
            return self.slots.alloc_decode(end, end, last)
        return self.slots.alloc_extend(prefix, prefix, end, end, last, total)

    def _release(self, request: Request, insert: bool) -> None:
        """As SGLang's ``release_kv_cache``, whose asserts want the scheduler's whole ``Req``."""
        if insert:
            self.tree.checkpoint(request, up_to=request.done)
        self.tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, request.done)])
        self.tree.unlock(request.lock)
        if self.parking and (request.is_cut or vars(request).get("new")):  # as of a session
            self.parking.forget(request.req_pool_idx)
        elif self.parking:
            self.parking.leave(Guest(request), request.exact_from)
        self.rows.free(request)
        self.running.remove(request)

    def _start_rows(self, given) -> torch.Tensor:
        started = [vars(request).pop("new", False) for request, _, _ in given]
        for request, _, _ in (work for work, new in zip(given, started, strict=True) if new):
            row, hit = request.req_pool_idx, request.done
            slots = self.rows.req_to_token[row, :hit].long()
            request.hit = hit
            held = [self.cached_sinks.get(s % len(self.seg.sinks.tag)) == s for s in slots.tolist()]
            request.lost_sinks = [p for p in range(min(hit, self.n_sink)) if not held[p]]
            self.counts["lost_sinks"] += len(request.lost_sinks)
            taken = ()
            if self.parking:
                taken = int(self.parking.source[row]), int(self.parking.low[row])
                self.counts["windows_taken"] += taken[0] > 0
            self.seg.windows.begin(row, hit, *taken)
            request.exact_from = max(taken[1], hit - self.n_ring) if taken and taken[0] else hit
            if hit:
                reference.restore_sinks(self.seg, row, slots[: self.n_sink])
        return torch.tensor(started)

    def _forward(self, given) -> None:
        self.tags.before()
        started = self._start_rows(given)
        rows = torch.tensor([r.req_pool_idx for r, *_ in given])
        prefix = torch.tensor([r.done for r, *_ in given])
        end = prefix + torch.tensor([n for _, n, _ in given])
        slots = torch.cat([s for *_, s in given])
        table = self.rows.req_to_token
        for request, n, mine in given:
            table[request.req_pool_idx, request.done : request.done + n] = mine.int()
        tokens = [t for r, n, _ in given for t in r.wanted[r.done : r.done + n]]
        index = [_index(r.wanted) for r, *_ in given]
        fresh = torch.cat(
            [i[r.done : r.done + n] for i, (r, n, _) in zip(index, given, strict=True)]
        )
        batch = reference.plan_batch(self.seg, rows, prefix, end, slots)
        for position, slot in zip(batch.positions.tolist(), slots.tolist(), strict=True):
            if position < self.n_sink:
                self.cached_sinks[slot % len(self.seg.sinks.tag)] = slot
        self.tags.begins(
            SimpleNamespace(
                req_pool_indices=rows,
                extend_prefix_lens=prefix,
                extend_prefix_lens_cpu=prefix.tolist(),
                seq_lens=end,
                input_ids=torch.tensor(tokens),
                out_cache_loc=slots,
                extend_num_tokens=len(tokens),
            ),
            started,
        )
        q, k, v = self.bank[:, fresh]
        out = reference.attention(self.seg, 0, batch, q, k, v, table, self.scratch, SCALE)
        self.tags.attended(0)
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
        recent = max(request.exact_from, request.overwritten, first + 1 - self.n_ring)
        recent += -recent % self.block
        coded[self.n_sink : min(first, recent)] = True
        coded[request.lost_sinks] = True
        ids = index[:end]
        k, v = (
            torch.where(coded[:, None, None], c, e[ids])[:, 0]
            for c, e in zip(self._coded(ids), self.bank[1:], strict=True)
        )
        logits = (self.bank[0, ids[first:], 0] @ k.T) * SCALE
        future = torch.arange(end)[None] > torch.arange(first, end)[:, None]
        return (logits.masked_fill(future, -torch.inf).softmax(-1) @ v)[:, None]


def _index(tokens: list[int]) -> torch.Tensor:
    """Which of BANK's rows stand for a sequence's tokens: the same after the same beginning."""
    chains = link(torch.tensor(tokens), torch.arange(len(tokens))).cumsum(0)
    return (chains ^ chains >> 29) % BANK


def report(machines: list[Machine]) -> dict[str, int]:
    """Counts of all machines, summed."""
    total = SimpleNamespace(tokens=sum(m.tags.checked_tokens for m in machines))
    names = dict.fromkeys(name for m in machines for name in m.counts)
    counts = {name: sum(m.counts.get(name, 0) for m in machines) for name in names}
    return {**counts, "reads_checked": total.tokens}
