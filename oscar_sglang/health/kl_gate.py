"""SGLang's own gate for cached prefixes, against a server that is running.

``sglang.test.kl_multiturn_utils`` samples answers on cached prefixes, then sends each whole text
again on an empty cache and compares the log-probabilities of the same tokens: a cache that gives
back what was put into it has a KL of 0 but for rounding. The cases, lengths and branches are those
of SGLang's kit (``kits/unified_radix_cache_kit``), comparison and estimator are its functions; only
the check of how much was cached is ours, because here it is a figure, not a condition.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..config import OscarError

# What SGLang's CI asks, nats: by default, of hybrid models with an FP8 cache, under decode context
# parallelism.
CI_THRESHOLDS = {"default": 0.003, "FP8 hybrids": 0.005, "DCP": 0.01}
HIGHEST_ID = 30_000  # of the kit's random suffixes


class GateError(OscarError):
    """The server cannot be measured; the message is for the operator."""


@dataclass(frozen=True)
class Sizes:
    """How much is sent. The defaults are those of SGLang's kit."""

    samples: int = 4  # prompts of the first case
    prompt_tokens: int = 3000
    groups: int = 3  # prefixes of the other cases ...
    branches: int = 3  # ... and requests on each
    prefix_tokens: int = 512
    turns: tuple[int, ...] = (512, 256)  # random tokens that begin the later turns
    new_tokens: int = 512  # sampled per turn

    @property
    def documents(self) -> int:
        return max(self.samples, self.groups)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        first = 256 + 64 * (self.branches - 1) + self.prefix_tokens
        later = sum(self.turns) + (1 + len(self.turns)) * self.new_tokens
        return max(self.prompt_tokens, first) + later


@dataclass(frozen=True)
class Result:
    """One case: the mean over samples of the KL estimate, in nats."""

    case: str
    kl: float
    error: float | None  # standard error of the mean over samples; None of one
    samples: int
    tokens: int  # compared
    hit: float  # cached tokens over those that this server can give back

    def passes(self, threshold: float) -> bool:
        return self.kl < threshold  # as SGLang compares


def measure(
    url: str,
    documents: list[list[int]],
    vocab: int,
    sizes: Sizes | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Every case in turn.

    documents  ``sizes.documents`` lists of at least ``prompt_tokens`` ids
    vocab      ids of the random suffixes are below it
    Raises GateError where the server does not answer, is busy, keeps no prefixes or is too small.
    """
    import requests
    from sglang.test import kl_multiturn_utils as kit

    sizes = sizes or Sizes()
    documents = [ids[: sizes.prompt_tokens] for ids in documents[: sizes.documents]]
    cases = {
        "turns": kit.test_input_output_logprobs_match_helper,
        "prefix hit": kit.test_input_output_logprobs_match_prefill_cache_hit_helper,
        "answer hit": kit.test_input_output_logprobs_match_decode_cache_hit_helper,
    }
    try:
        hits = _Hits(*_state(url, requests, sizes))
        for name, run in cases.items():
            hits.cached = hits.possible = 0
            prompts = _prompts(name, documents, sizes, vocab, hits)
            with _recorded(kit, say) as kls:
                run(url, name, math.inf, label=name, max_new_tokens=sizes.new_tokens, **prompts)
            if not hits.cached:
                raise GateError(f"{url}: {name}: nothing was cached, so nothing was measured")
            yield _result(name, kls, sizes, hits)
    except requests.RequestException as error:
        raise GateError(f"{url}: {error}; is the server up and idle?") from None


def _state(url: str, requests, sizes: Sizes) -> tuple[int, int]:
    """Page size, and tokens at a prompt's end that are computed although they are cached."""
    response = requests.get(url + "/server_info", timeout=30)
    response.raise_for_status()
    info = response.json()
    if info["disable_radix_cache"]:
        raise GateError(f"{url} keeps no prefixes (--disable-radix-cache)")
    state = info["internal_states"][0]
    room = state["memory_usage"]["token_capacity"]
    if room < sizes.longest:
        raise GateError(
            f"{url} holds {room} tokens, the longest sequence has {sizes.longest}: "
            "ask for fewer --prompt-tokens or --new-tokens"
        )
    oscar = state.get("oscar", {})
    tail = oscar["recent_tokens"] if oscar.get("prefix_window") == "recompute" else 0
    return state["page_size"], tail


@dataclass
class _Hits:
    """SGLang's callbacks, which count instead of asserting."""

    page: int
    tail: int
    cached: int = 0
    possible: int = 0

    def prefill(self, answer: dict, prefix: int, _label: str) -> None:
        meta = answer["meta_info"]
        self.cached += meta["cached_tokens"]
        self.possible += min(prefix, meta["prompt_tokens"] - self.tail) // self.page * self.page

    def decode(self, answer: dict, before: int, generated: int, label: str) -> None:
        self.prefill(answer, before + generated - 1, label)  # the last token was never computed


def _prompts(name: str, documents: list, sizes: Sizes, vocab: int, hits: _Hits) -> dict:
    """Arguments of a case, as the kit makes them."""
    ids = range(1, min(vocab - 1, HIGHEST_ID) + 1)

    def suffixes(n: int, seed: int) -> list[list[list[int]]]:
        return [
            [random.Random(f"{seed} {turn} {i}").choices(ids, k=turn) for i in range(n)]
            for turn in sizes.turns
        ]

    prefixes = [ids[: sizes.prefix_tokens] for ids in documents[: sizes.groups]]
    spread = [list(p) for p in prefixes for _ in range(sizes.branches)]
    common = {"assert_decode_cached_tokens": hits.decode}
    match name:
        case "turns":
            first = documents[: sizes.samples]
            return {**common, "input_ids": first, "turn_suffixes": suffixes(len(first), 1)}
        case "prefix hit":
            rng = random.Random(2)
            first = [
                p + rng.choices(ids, k=256 + 64 * (i % sizes.branches))
                for i, p in enumerate(spread)
            ]
            own: dict[str, Any] = {"prefix_input_ids": spread, "full_input_ids": first}
            own["assert_prefill_cached_tokens"] = hits.prefill
            seed = 3
        case _:
            own, seed = {"first_turn_input_ids": spread}, 4
    own["branches_per_group"] = sizes.branches
    return {**common, **own, "turn_suffixes": suffixes(len(spread), seed)}


@contextlib.contextmanager
def _recorded(kit, say: Callable[[str], None]) -> Iterator[list[float]]:
    """The KL of each sample, by SGLang's own comparison, which only prints it."""
    from sglang.test import kl_test_utils

    found: list[float] = []
    compare = kit.compare_kl_divergence

    def record(inputs, outputs, thresholds, model, label) -> None:
        for given, sampled in zip(inputs, outputs, strict=True):
            printed: list[str] = []
            try:
                with patch.object(kl_test_utils, "print", printed.append, create=True):
                    compare([given], [sampled], thresholds, model, label)
            except (AssertionError, TypeError, ValueError) as error:
                raise GateError(f"{label}: log-probabilities are not comparable: {error}") from None
            average = re.search(r"avg_kl_div=(\S+)", "\n".join(printed))
            if average is None:
                raise GateError(f"{label}: SGLang's comparison printed no average")
            found.append(float(average[1]))
            say(f"{label}: sample {len(found)}: {found[-1]:.4f}")

    silent = patch.object(kit, "print", lambda *_: None, create=True)
    with patch.object(kit, "compare_kl_divergence", record), silent:
        yield found


def _result(name: str, kls: list[float], sizes: Sizes, hits: _Hits) -> Result:
    return Result(
        case=name,
        kl=statistics.fmean(kls),
        error=statistics.stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else None,
        samples=len(kls),
        tokens=len(kls) * sizes.new_tokens,
        hit=hits.cached / hits.possible,
    )


def served_model(url: str) -> str:
    """What a server calls its model: a folder or a name on the hub."""
    import requests

    try:
        return requests.get(url + "/model_info", timeout=30).json()["model_path"]
    except (requests.RequestException, KeyError) as error:
        raise GateError(f"{url} does not answer as an SGLang server: {error}") from None


def documents(model: Path, sources: list[str] | None, sizes: Sizes) -> tuple[list[list[int]], int]:
    """What ``measure`` sends, and the vocabulary size of the model in folder ``model``.

    sources  text files or NPZ:KEY; None: LongBench v2, as SGLang's own tests read it
    """
    from ..calibration.data import vocabulary

    found = cut(sources, model, sizes) if sources else _longbench(model, sizes)
    return found, vocabulary(model)


def _longbench(folder: Path, sizes: Sizes) -> list[list[int]]:
    from sglang.test.kl_multiturn_utils import get_input_ids

    try:  # SGLang cuts at half to one and a half times of what is asked
        return get_input_ids(str(folder), 2 * sizes.prompt_tokens, sizes.documents)
    except Exception as error:  # `datasets` and the hub have many
        raise GateError(f"LongBench v2 cannot be read: {error}; give --text SOURCE") from None


def cut(sources: list[str], model: Path, sizes: Sizes) -> list[list[int]]:
    """Documents of ``prompt_tokens`` ids from text files or arrays."""
    from ..calibration.data import load_tokens

    found: list[list[int]] = []
    for source in sources:
        tokens = load_tokens(source, model, sizes.documents * sizes.prompt_tokens)
        for ids in tokens.sequences:
            found += [part.tolist() for part in ids.split(sizes.prompt_tokens)]
    found = [ids for ids in found if len(ids) == sizes.prompt_tokens]
    if len(found) < sizes.documents:
        raise GateError(
            f"{', '.join(sources)}: {len(found)} documents of {sizes.prompt_tokens} tokens, "
            f"{sizes.documents} are needed: give more text or fewer --prompt-tokens"
        )
    return found


def as_dict(result: Result) -> dict:
    passed = {name: result.passes(limit) for name, limit in CI_THRESHOLDS.items()}
    return asdict(result) | {"below": passed}
