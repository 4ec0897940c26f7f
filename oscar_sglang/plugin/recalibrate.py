"""A new calibration inside the running server, from its own model, into the same tensors.

The engine is idle and its cache empty. Uniform random ids are replaced by what the model expects
after each of them (as ``calibration.selfsample`` does), the resulting sequences are prefilled
through the server's own attention backend, whose fresh tokens attend exactly, and every layer is
fitted as at the first start. Each rank sees and fits its own heads; ranks agree on the tokens, on
when time is up and on whether all of them have succeeded before any of them changes a parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..calibration.errors import CalibrationError
from ..calibration.fit import fit_layer
from ..calibration.sglang_engine import prefill_batch
from ..calibration.stats import Accumulator
from ..kernels.codec import CODECS, LayerParams

logger = logging.getLogger(__name__)

TOKENS = 8192
BUDGET_SECONDS = 240.0  # SGLang and its clients wait meanwhile
_LEAST_TOKENS = 512
_ROWS = 256  # logits held at a time
_LOG_SECONDS = 5.0


@dataclass
class Recalibration:
    params: list[LayerParams]
    tokens: int
    length: int  # of a sequence
    warnings: list[str]


class _Ranks:
    """The tensor-parallel ranks of this model; all of them are here at the same time."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.alone = group is None or torch.distributed.get_world_size(group) == 1

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        if self.alone:
            return yes
        votes = torch.tensor([int(yes)])
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, self.group)
        return bool(votes)

    def of_the_first(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` (on the CPU) of the first rank."""
        if not self.alone:
            first = torch.distributed.get_global_rank(self.group, 0)
            torch.distributed.broadcast(ids, first, self.group)
        return ids


class _Clock:
    def __init__(self, seconds: float) -> None:
        self.start = self.logged = time.monotonic()
        self.end = self.start + seconds

    def left(self, share: float = 1.0) -> bool:
        """Whether less than ``share`` of the time has passed."""
        return time.monotonic() < self.start + share * (self.end - self.start)

    def tell(self, what: str, done: int, total: int) -> None:
        if time.monotonic() > self.logged + _LOG_SECONDS or done == total:
            self.logged = time.monotonic()
            logger.info("oscar: recalibrating: %s, %d of %d", what, done, total)


@torch.no_grad()
def gather_and_fit(
    runner: Any,
    pool: Any,
    group: Any = None,
    *,
    longest: int,
    tokens: int = TOKENS,
    seconds: float = BUDGET_SECONDS,
    seed: int = 0,
) -> Recalibration:
    """Parameters for the weights that ``runner`` (SGLang's ModelRunner) has now.

    ``pool`` is written with rows that belong to nobody; ``longest`` bounds a sequence. Raises
    CalibrationError with a reason for the operator, on all ranks or on none.
    """
    ranks, clock = _Ranks(group), _Clock(seconds)
    width = runner.req_to_token_pool.req_to_token.shape[1]
    length = min(longest, pool.size, width, tokens)
    spec, n_sink = pool.segments.spec, pool.windows.n_sink
    if length < max(_LEAST_TOKENS, 2 * n_sink):
        raise CalibrationError(
            f"a prefill of {length} tokens is too short to calibrate on; raise "
            "--chunked-prefill-size, --context-length or --max-total-tokens"
        )
    accumulator, generator = Accumulator(n_sink), torch.Generator(runner.device).manual_seed(seed)
    warnings, done = [], 0
    for _ in range(-(-tokens // length)):
        if done and not ranks.agree(clock.left(0.5)):
            warnings.append(f"only {done} of {tokens} tokens in {seconds:.0f} s")
            break
        ids, expected = _expected(runner, pool, length, generator, ranks)
        if not expected and not warnings:
            warnings.append("the model's logits cannot be seen: uniform random ids were used")
        with _observed(pool, accumulator, length):
            _prefill(runner, pool, ids)
        accumulator.advance(length)
        done += length
        clock.tell("tokens", done, tokens)
    params, problem = [], None
    try:
        params = _fit(accumulator.finish(pool.layer_num), spec.name, clock)
    except CalibrationError as error:
        problem = error
    if not ranks.agree(problem is None):
        raise problem or CalibrationError("another rank could not be calibrated; see its log")
    return Recalibration(params, done, length, warnings)


def _fit(moments: list, codec: str, clock: _Clock) -> list[LayerParams]:
    params: list[LayerParams] = []
    for layer in moments:
        if not clock.left():
            raise CalibrationError(
                f"{len(params)} of {len(moments)} layers were fitted when the time was up"
            )
        params.append(fit_layer(layer, codec).params)
        clock.tell("layers", len(params), len(moments))
    for i, layer in enumerate(params):
        if not all(bool(t.isfinite().all()) for t in layer if t is not None):
            raise CalibrationError(f"layer {i}: the fit is NaN or infinite")
    return params


@contextmanager
def _observed(pool: Any, accumulator: Accumulator, tokens: int) -> Iterator[None]:
    """Show every layer's rows of a prefill of ``tokens`` fresh tokens to ``accumulator``."""

    def see(layer: int, *rows: torch.Tensor) -> None:
        heads = (x[:tokens].reshape(tokens, -1, pool.scratch.shape[-1]) for x in rows)
        accumulator.add(layer, *heads)

    pool.observer = see
    try:
        yield
    finally:
        pool.observer = None


def _expected(runner, pool, length: int, generator, ranks: _Ranks) -> tuple[torch.Tensor, bool]:
    """Ids [length] that the model itself expects, its second half the first once more, and whether
    the model could be asked."""
    vocab, config = runner.model_config.vocab_size, runner.model_config.hf_text_config
    half = torch.randint(vocab, ((length + 1) // 2,), generator=generator, device=generator.device)
    if isinstance(bos := getattr(config, "bos_token_id", None), int):
        half[0] = bos
    with _sampled(runner.model, len(half) - 1, vocab, generator) as found:
        _prefill(runner, pool, half)
    if found:
        half = torch.cat([half[:1], *found])
    half = ranks.of_the_first(half.cpu()).to(runner.device)
    return torch.cat([half, half])[:length], bool(found)


@contextmanager
def _sampled(model, rows: int, vocab: int, generator) -> Iterator[list[torch.Tensor]]:
    """A list that a prefill fills with an id drawn after each of its first ``rows`` tokens."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor

    found: list[torch.Tensor] = []

    def draw(module, args, kwargs) -> None:
        names = ("input_ids", "hidden_states", "lm_head", "logits_metadata")
        given = dict(zip(names, args, strict=False)) | kwargs
        metadata = LogitsMetadata.from_forward_batch(given["logits_metadata"])
        for hidden in given["hidden_states"][:rows].split(_ROWS):
            logits = module._get_logits(hidden, given["lm_head"], metadata, use_logits_buffer=False)
            shares = logits[:, :vocab].float().softmax(-1)
            found.append(torch.multinomial(shares, 1, generator=generator)[:, 0])

    hooks = [
        m.register_forward_pre_hook(draw, with_kwargs=True)
        for m in model.modules()
        if isinstance(m, LogitsProcessor)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _prefill(runner: Any, pool: Any, ids: torch.Tensor) -> None:
    """One fresh request of SGLang's on a free row, in the pool's first slots, and gone again."""
    requests = runner.req_to_token_pool
    (row,) = requests.alloc_rows(1)
    try:
        runner.forward(prefill_batch(runner, ids, row, first_slot=pool.page_size))
    finally:
        requests.free_rows([row])


def needs_data(codec: str) -> bool:
    """Whether the codec has anything that depends on weights."""
    return CODECS[codec].needs_data
