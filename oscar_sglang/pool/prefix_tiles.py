"""Cutting the cached prefixes of a batch into tiles that fit the scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Tile:
    """Consecutive requests and a range of positions of each, at most one scratch full of keys.

    rows, starts  [n] int      request row, first position
    cu_k, cu_q    [n+1] int32  where each request's keys and fresh tokens begin
    requests      slice of the batch       queries  slice of its fresh tokens
    """

    rows: torch.Tensor
    starts: torch.Tensor
    cu_k: torch.Tensor
    cu_q: torch.Tensor
    tokens: int
    max_k: int
    max_q: int
    requests: slice
    queries: slice


@dataclass
class ExtendPlan:
    """Device metadata of one extend; ``tiles`` is empty when nothing is cached."""

    cu_fresh: torch.Tensor  # [B+1] int32
    longest: int
    hist_end: torch.Tensor  # [B] int64
    tiles: list[Tile]


def split(prefix: list[int], capacity: int) -> list[list[tuple[int, int, int]]]:
    """Tiles as lists of (request, first position, length); requests without a prefix inside a
    tile appear with length 0, so that a tile covers consecutive requests. A tile that holds
    everything covers the whole batch."""
    if 0 < sum(prefix) <= capacity:
        return [[(request, 0, n) for request, n in enumerate(prefix)]]
    tiles: list[list[tuple[int, int, int]]] = []
    current: list[tuple[int, int, int]] = []
    room = capacity
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


def _starts(lengths: list[int]) -> list[int]:
    total, starts = 0, [0]
    for n in lengths:
        starts.append(total := total + n)
    return starts


def plan_tiles(
    prefix: list[int], fresh: list[int], capacity: int, rows: torch.Tensor, device
) -> list[Tile]:
    """Tiles of a batch; one transfer to the device for all of them.

    prefix, fresh  cached and new tokens of each request
    capacity       keys the scratch holds
    rows           [B] int64 request rows, on the device
    """
    parts = split(prefix, capacity)
    if not parts:
        return []
    host = []
    for part in parts:
        lengths = [n for *_, n in part]
        queries = [fresh[request] for request, *_ in part]
        host.append([[start for _, start, _ in part], _starts(lengths), _starts(queries)])
    flat = [n for lists in host for numbers in lists for n in numbers]
    packed = to_device(torch.tensor(flat, dtype=torch.int32), device)
    query_starts, at, tiles = _starts(fresh), 0, []
    for part, lists in zip(parts, host, strict=True):
        sizes = [len(numbers) for numbers in lists]
        starts, cu_k, cu_q = packed[at : at + sum(sizes)].split(sizes)
        at += sum(sizes)
        low, high = part[0][0], part[-1][0] + 1
        tiles.append(
            Tile(
                rows[low:high],
                starts,
                cu_k,
                cu_q,
                tokens=lists[1][-1],
                max_k=max(n for *_, n in part),
                max_q=max(fresh[low:high]),
                requests=slice(low, high),
                queries=slice(query_starts[low], query_starts[high]),
            )
        )
    return tiles
