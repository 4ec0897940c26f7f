"""Cutting the cached prefixes of a batch into tiles that fit the scratch, and tiles into splits.

A split is a share of one request's keys in a tile. Few query rows against many keys would occupy
few of the GPU's processors, and ragged prefill kernels do not split keys by themselves: here each
split is one more sequence of the batch, with its own copy of the queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_QUERY_BLOCK = 128  # rows of one program of the attention kernel
_MIN_SPLIT = 512  # keys
_MAX_SPLITS = 32


@dataclass
class Tile:
    """Consecutive requests and a range of positions of each, at most one scratch full of keys.

    rows, starts  [n] int          request row, first position
    indptr        [n+1] int32      where each request's keys begin
    cu_k, cu_q    [n*splits+1] int32  the same for the sequences of the attention call
    index         [sum of their queries] int32  the query (of ``queries``) behind each copy
    first, step   [queries] int32  copies of a query: rows first + i * step, i < splits
    requests      slice of the batch       queries  slice of its fresh tokens
    """

    rows: torch.Tensor
    starts: torch.Tensor
    indptr: torch.Tensor
    cu_k: torch.Tensor
    cu_q: torch.Tensor
    index: torch.Tensor
    first: torch.Tensor
    step: torch.Tensor
    splits: int
    tokens: int
    longest: int
    max_k: int
    max_q: int
    requests: slice
    queries: slice


def split(prefix: list[int], capacity: int) -> list[list[tuple[int, int, int]]]:
    """Tiles as lists of (request, first position, length); requests without a prefix inside a
    tile appear with length 0, so that a tile covers consecutive requests."""
    tiles, current, room = [], [], capacity
    for request, total in enumerate(prefix):
        done = 0
        while done < total:
            if room == 0:
                tiles.append(current)
                current, room = [], capacity
            n = min(room, total - done)
            current.append((request, done, n))
            done, room = done + n, room - n
        if total == 0 and current:
            current.append((request, 0, 0))
    while current and current[-1][2] == 0:
        current.pop()
    if current:
        tiles.append(current)
    return tiles


def to_device(host: torch.Tensor, device) -> torch.Tensor:
    """A copy on ``device`` that the host does not wait for; ``host`` may change afterwards."""
    if torch.device(device).type == "cuda":
        host = host.pin_memory()  # a copy, kept by the allocator until the transfer is done
    return host.to(device, non_blocking=True, copy=True)


def choose_splits(part: list[tuple[int, int, int]], fresh: list[int], target: float) -> int:
    """Splits of a tile so that about ``target`` query blocks of 128 rows run at once."""
    blocks = sum(-(-fresh[request] // _QUERY_BLOCK) for request, _, _ in part)
    longest = max(n for _, _, n in part)
    return max(1, min(math.ceil(target / blocks), longest // _MIN_SPLIT, _MAX_SPLITS))


def _numbers(part: list[tuple[int, int, int]], fresh: list[int], splits: int) -> list[list[int]]:
    """The host side of ``Tile``: starts, indptr, cu_k, cu_q, index, first, step."""
    starts, indptr, cu_k, cu_q = [], [0], [0], [0]
    index, first, step = [], [], []
    seen = 0
    for request, start, n in part:
        length = fresh[request]
        starts.append(start)
        indptr.append(indptr[-1] + n)
        first += range(cu_q[-1], cu_q[-1] + length)
        step += [length] * length
        for i in range(splits):
            cu_k.append(indptr[-2] + n * (i + 1) // splits)
            cu_q.append(cu_q[-1] + length)
            index += range(seen, seen + length)
        seen += length
    return [starts, indptr, cu_k, cu_q, index, first, step]


def plan_tiles(
    prefix: list[int], fresh: list[int], capacity: int, rows: torch.Tensor, device, target: float
) -> list[Tile]:
    """Tiles of a batch; one transfer to the device for all of them.

    prefix, fresh  cached and new tokens of each request
    capacity       keys the scratch holds
    rows           [B] int64 request rows, on the device
    target         query blocks that should run at once (see ``choose_splits``)
    """
    starts_of = [0]
    for n in fresh:
        starts_of.append(starts_of[-1] + n)
    parts = split(prefix, capacity)
    host = []
    for part in parts:
        splits = choose_splits(part, fresh, target)
        host.append((part, splits, _numbers(part, fresh, splits)))
    if not host:
        return []
    flat = [n for _, _, lists in host for numbers in lists for n in numbers]
    packed = to_device(torch.tensor(flat, dtype=torch.int32), device)
    tiles, at = [], 0
    for part, splits, lists in host:
        sizes = [len(numbers) for numbers in lists]
        views = packed[at : at + sum(sizes)].split(sizes)
        at += sum(sizes)
        low, high = part[0][0], part[-1][0] + 1
        longest = max(n for _, _, n in part)
        tiles.append(
            Tile(
                rows[low:high],
                *views,
                splits=splits,
                tokens=lists[1][-1],
                longest=longest,
                max_k=-(-longest // splits),
                max_q=max(fresh[low:high]),
                requests=slice(low, high),
                queries=slice(starts_of[low], starts_of[high]),
            )
        )
    return tiles
