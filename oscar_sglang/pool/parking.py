"""Exact windows that outlive their request: ``--oscar-prefix-window park``.

The ring of a request row keeps the last tokens in the model's dtype until another request gets the
row. The next turn of a conversation, or a branch of it, begins with the same tokens: it takes over
the ring rows before its first new token, and nothing that is cached is computed again.

Which rows can be taken is decided on the host, by tokens alone: a ring row holds K and V of a
position after all tokens before it, so it serves every request that begins with the same tokens
under the same key of the prefix cache, whichever slots hold their codes. The device is never
waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch


@dataclass(eq=False)
class Ring:
    """What a request left in its row: positions [low, len(tokens)) of ``tokens`` [T] int64.

    key   what the prefix cache tells apart besides tokens
    age   counts up with every ring that is left
    """

    row: int
    tokens: np.ndarray
    key: tuple
    low: int
    age: int


@dataclass
class Match:
    """Rings that serve a request, as far as they have been looked at.

    tokens  how many the request had then
    age     of the next ring to look at
    found   (ring, how many first tokens it has in common with the request)
    """

    tokens: int
    age: int = 0
    found: list[tuple[Ring, int]] = field(default_factory=list)


def tokens_of(req: Any) -> np.ndarray:
    """Prompt and answer of SGLang's ``req`` so far, [T] int64."""
    prompt = np.asarray(req.origin_input_ids, dtype=np.int64)
    return np.concatenate([prompt, np.asarray(req.output_ids, dtype=np.int64)])


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first elements are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class Parking:
    """Who left what in which row, and what the requests that begin now take over.

    n_recent  rows of a ring
    slack     exact rows that a window may lack without being computed again: a page, as prefixes
              match in whole pages, and the row that SGLang's overlapped last step overwrites
    source    [R] int64, of each row: the row whose ring it takes over (itself: its own), 0: none
    low       [R] int64, of each row: the first position that is exact there
    """

    def __init__(self, rows: int, n_recent: int, page_size: int) -> None:
        self.n_recent, self.slack = n_recent, page_size + 1
        self.source = torch.zeros(rows, dtype=torch.int64)
        self.low = torch.zeros_like(self.source)
        self.found = self.missed = 0
        self._age = 0
        self._left: dict[int, Ring] = {}
        self._matches: WeakKeyDictionary[Any, Match] = WeakKeyDictionary()

    def clear(self) -> None:
        """Nobody may take over what is in the rows now."""
        self._left.clear()

    def left(self) -> set[int]:
        """Rows whose ring may be taken over."""
        return set(self._left)

    def forget(self, row: int) -> None:
        """Nobody may take over what is in ``row`` now."""
        self.source[row] = 0
        self._left.pop(row, None)

    def leave(self, req: Any, start: int) -> None:
        """``req`` gives its row back, whose ring began at position ``start``."""
        row = req.kv.req_pool_idx
        self.forget(row)
        tokens = tokens_of(req)[: req.kv.kv_committed_len]
        written = max(req.kv.kv_allocated_len, req.kv.kv_committed_len)
        low = max(start, written + 1 - self.n_recent)
        if low < len(tokens):
            self._left[row] = Ring(row, tokens, _key(req), low, self._age)
            self._age += 1

    def tail(self, req: Any) -> int:
        """Last tokens of ``req``'s prompt that must be computed for an exact window although they
        may be cached."""
        match = self._match(req)
        enough = max(0, match.tokens - self.n_recent + self.slack)
        reach = max((n for ring, n in match.found if ring.low <= enough), default=0)
        return min(self.n_recent, match.tokens - reach)

    def take(self, free: list[int], reqs: Sequence[Any]) -> None:
        """``reqs`` are about to get the last rows of ``free``, in that order: choose which rows
        these are, oldest first and if possible none whose ring is taken over, and what each
        request takes over."""
        if len(reqs) > len(free):
            return
        sources = [self._source(req) for req in reqs]
        taken_over = {ring.row for ring in sources if ring}
        spare = [row for row in free if row not in taken_over]
        needed = [row for row in free if row in taken_over]
        chosen = []
        for ring in sources:
            if spare:
                row = spare.pop(0)
            else:
                row = ring.row if ring and ring.row in needed else needed[0]
                needed.remove(row)
            chosen.append(row)
        for req, row, ring in zip(reqs, chosen, sources, strict=True):
            # A source that another request gets in the same batch is no longer what it was.
            if ring and ring.row != row and ring.row in chosen:
                ring = None
            self.source[row] = ring.row if ring else 0
            self.low[row] = ring.low if ring else req.prefix_len
            self.found += ring is not None
            self.missed += ring is None and req.prefix_len > 0
        for row in chosen:
            self._left.pop(row, None)
        free[:] = [row for row in free if row not in chosen] + chosen

    def _source(self, req: Any) -> Ring | None:
        """The ring that reaches furthest back from the end of ``req``'s cached prefix."""
        end = req.prefix_len
        rings = [r for r, n in self._match(req).found if r.low < end <= n]
        return min(rings, key=lambda r: (r.low, -r.age), default=None)

    def _match(self, req: Any) -> Match:
        """Each ring is compared once with each request, which may wait for many rounds."""
        total = len(req.origin_input_ids) + len(req.output_ids)
        match = self._matches.get(req)
        if match is None or match.tokens != total:
            match = self._matches[req] = Match(total)
        match.found = [(r, n) for r, n in match.found if self._left.get(r.row) is r]
        if match.age < self._age:
            tokens, key = tokens_of(req), _key(req)
            for ring in self._left.values():
                if ring.age < match.age or ring.key != key or ring.low >= total:
                    continue
                at = ring.low  # differs in nearly all rings of others
                if ring.tokens[at] == tokens[at] and (n := common(ring.tokens, tokens)) > at:
                    match.found.append((ring, n))
            match.age = self._age
        return match


def _key(req: Any) -> tuple:
    return req.extra_key, req.cache_salt


# Of each of SGLang's ReqToTokenPools whose rings outlive their requests.
_of_rows: WeakKeyDictionary[Any, Parking] = WeakKeyDictionary()


def park(rows: Any, parking: Parking | None) -> None:
    """``parking`` keeps the rings of SGLang's ReqToTokenPool ``rows``."""
    if parking:
        _of_rows[rows] = parking


def parking_of(rows: Any) -> Parking | None:
    return _of_rows.get(rows)
