"""What a place of a store holds by the records of ``tags``: whose token, and which bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class OwnershipError(RuntimeError):
    """Attention would read, or has read, something else than the token it asked for."""


def checksum(*rows: torch.Tensor) -> torch.Tensor:
    """[T] int64 over the bytes of rows [T, ...]; NaN payloads count like any other byte."""
    data = torch.cat([r.contiguous().flatten(1).view(torch.uint8) for r in rows], -1).long()
    index = torch.arange(1, data.shape[1] + 1, device=data.device)
    weight = index * 0x9E3779B97F4A7C1 + 12345
    return ((data + 1) * weight).sum(-1)


class Places:
    """What was put at each address of one store: chain, position (-1: nothing yet), bytes.

    ``per_row`` addresses belong to each request row, 0: they belong to none. ``rows``: the store's
    K and V of layer 0 by address; history has its own way.
    """

    def __init__(self, name: str, count: int, per_row: int, rows: Sequence, device) -> None:
        self.name, self.per_row, self.rows = name, per_row, rows
        self.chain = torch.zeros(count, dtype=torch.int64, device=device)
        self.position = torch.full((count,), -1, dtype=torch.int64, device=device)
        self.bytes = torch.zeros(count, dtype=torch.int64, device=device)

    def put(self, address, chains, positions, sums) -> None:
        self.chain[address], self.position[address] = chains, positions
        self.bytes[address] = sums

    def complaint(self, address: int, wanted: int, foreign: bool) -> str:
        """What is wrong with a place where position ``wanted`` should be: it holds a ``foreign``
        token, or other bytes."""
        held = int(self.position[address])
        index, where = address, f"{self.name} {address}"
        if self.per_row:
            row, index = divmod(address, self.per_row)
            where = f"{self.name} {index} of row {row}"
        what = "no token" if held < 0 else f"position {held} of another sequence"
        if not foreign:
            what = "other bytes than were written for it"
        elif held == wanted:
            what = f"position {held}, but of another sequence"
        return f"position {wanted}: {where} holds {what}"


def link(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a token adds to the chain of its sequence, int64 with wrap-around."""
    x = (tokens + 1) * 0x1E3779B97F4A7C15 + (positions + 1) * 0x42B2AE3D27D4EB4F
    x = (x ^ x >> 31) * 0x165667B19E3779F9
    x = (x ^ x >> 29) * 0x27D4EB2F165667C5
    return x ^ x >> 32


class Flat(NamedTuple):
    """Tokens of several requests, one after the other, all [T]; ``first`` is an index into T."""

    request: torch.Tensor
    first: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, lens: torch.Tensor, total: int) -> Flat:
        """``lens`` [B] tokens from position ``starts`` [B] on; ``total`` their sum."""
        index = torch.arange(len(lens), device=lens.device)
        request = torch.repeat_interleave(index, lens, output_size=total)
        first = (lens.cumsum(0) - lens)[request]
        position = torch.arange(total, device=lens.device) - first + starts[request]
        return cls(request, first, position)

    def chains(self, tokens: torch.Tensor, previous: torch.Tensor | int) -> torch.Tensor:
        """``previous`` [T]: chain before the request's first token here."""
        added = link(tokens, self.position)
        total = added.cumsum(0)
        return total - (total - added)[self.first] + previous
