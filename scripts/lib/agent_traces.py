"""Recorded agent sessions as token ids: the ``weka_trace`` files of kv-cache-tester.

A file is one session: ``id``, ``block_size`` and ``requests``, a list of ``{t, in, out,
hash_ids}``: seconds from the session's start, prompt and output tokens, and one id for each whole
block of the prompt. Ids mean the same block within one file only (``hash_id_scope`` local), and two
prompts with equal leading ids share that prefix. Nothing of the text is recorded, so each block
gets random tokens of its own, and a prompt's last, partial block random tokens of its request.
"""

from __future__ import annotations

import functools
import json
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.shapes import FIRST_TOKEN, UNUSED_TOKEN


class TraceError(ValueError):
    """A file that is not a recorded session; the message is for the operator."""


@dataclass(frozen=True)
class Request:
    """``wait``: seconds between the end of the request before and the start of this one."""

    blocks: tuple[int, ...]
    tokens: int
    new_tokens: int
    wait: float


@dataclass(frozen=True)
class Session:
    name: str
    block_size: int
    requests: tuple[Request, ...]

    def prompt(self, number: int) -> list[int]:
        """The ids of a request's prompt; equal leading blocks give equal ids."""
        request = self.requests[number]
        ids = [i for block in request.blocks for i in _tokens(self.block_size, self.name, block)]
        rest = request.tokens - len(ids)
        return ids + list(_tokens(rest, self.name, f"rest {number}"))


@functools.lru_cache(maxsize=200_000)
def _tokens(n: int, session: str, block: int | str) -> tuple[int, ...]:
    rng = random.Random(f"{session} {block}")
    return tuple(rng.choices(range(FIRST_TOKEN, UNUSED_TOKEN), k=n))


def load(path: Path, longest: int) -> list[Session]:
    """Sessions of a JSON file, a folder or a tar archive of them, ordered by name.

    longest  requests with more tokens, answer included, are left out: a server refuses them
    Raises TraceError if there is none with two requests or more.
    """
    sessions = [_session(name, text, longest) for name, text in _files(path)]
    found = sorted((s for s in sessions if len(s.requests) > 1), key=lambda s: s.name)
    if not found:
        raise TraceError(f"{path}: no session with two requests of at most {longest} tokens")
    return found


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield file.name, file.read_text()
    elif path.suffix == ".json":
        yield path.name, path.read_text()
    else:
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.name.endswith(".json") and (file := archive.extractfile(member)):
                        yield Path(member.name).name, file.read().decode()
        except tarfile.ReadError as error:
            raise TraceError(f"{path} is no .json file, folder or tar archive: {error}") from None


def _session(name: str, text: str, longest: int) -> Session:
    try:
        data = json.loads(text)
        size, found, end = data["block_size"], [], None
        for entry in data["requests"]:
            if "hash_ids" in entry:  # not so a subagent, whose requests are a conversation apart
                request = _request(entry, size, end)
                if request.tokens + request.new_tokens <= longest:
                    found.append(request)
                end = entry["t"] + (entry.get("api_time") or 0.0)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TraceError(f"{name} is not a recorded session: {error!r}") from None
    return Session(str(data.get("id", name)), size, tuple(found))


def _request(entry: dict[str, Any], size: int, end: float | None) -> Request:
    blocks, tokens = tuple(entry["hash_ids"]), entry["in"]
    if not 0 <= tokens - len(blocks) * size <= size:
        raise TraceError(f"{len(blocks)} blocks of {size} do not make a prompt of {tokens} tokens")
    wait = 0.0 if end is None else max(0.0, entry["t"] - end)
    return Request(blocks, tokens, max(1, entry["out"]), wait)
