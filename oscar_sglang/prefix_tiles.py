"""Cutting the cached prefixes of a batch into tiles that fit the scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Tile:
    """Consecutive requests and a range of positions of each, at most one scratch full of keys.

    rows, starts  [n] int64    request row, first position
    cu_k, cu_q    [n+1] int32  where each request's keys and queries begin
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
    starts_of = [0]
    for n in fresh:
        starts_of.append(starts_of[-1] + n)
    numbers: list[int] = []
    shapes = []
    for part in parts:
        first, last = part[0][0], part[-1][0] + 1
        cu_q = [s - starts_of[first] for s in starts_of[first : last + 1]]
        cu_k = [0]
        for _, _, n in part:
            cu_k.append(cu_k[-1] + n)
        shapes.append((first, last, len(numbers), cu_k[-1]))
        numbers += [start for _, start, _ in part] + cu_k + cu_q
    packed = to_device(torch.tensor(numbers, dtype=torch.int32), device)
    tiles = []
    for part, (first, last, at, tokens) in zip(parts, shapes, strict=True):
        n = last - first
        starts, cu_k, cu_q = packed[at : at + 3 * n + 2].split([n, n + 1, n + 1])
        tiles.append(
            Tile(
                rows=rows[first:last],
                starts=starts,
                cu_k=cu_k,
                cu_q=cu_q,
                tokens=tokens,
                max_k=max(length for _, _, length in part),
                max_q=max(fresh[first:last]),
                requests=slice(first, last),
                queries=slice(starts_of[first], starts_of[last]),
            )
        )
    return tiles
