"""What a calibration runs, on which tokens, and what its codecs may choose: one value for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .data import RANDOM, Tokens, load_tokens
from .fit import N_SINK

if TYPE_CHECKING:
    from .collect import Progress

DEFAULT_TOKENS = 8192


@dataclass(frozen=True)
class Plan:
    """A run of a model over tokens, and the options of the codecs fitted to it.

    data      ``random``, a text file, or NPZ:KEY (see ``data.load_tokens``)
    tokens    ids of ``data`` that are run, at most
    seed      of random ids
    n_sink    positions below it are left out: the cache keeps them exact
    progress  called with (stage, done, total)
    engine    what runs the model: transformers, or sglang for any checkpoint SGLang can load
    partial   file that keeps the sums of an interrupted run (transformers engine); removed at the
              end
    tp        tensor-parallel ranks (sglang engine)
    codec_options  of ``omni`` (``codec_omni.OPTIONS``)
    context        positions that ``position`` is fitted for; None: the model's own context length
    bits           per element that ``position`` may spend on history; what is left over 2 bits and
                   metadata widens the K or V of some layers (``widths``). None: ``EXTRA_BITS``
    images         files that a vision-language model reads besides (transformers engine)
    """

    model_dir: Path
    data: str = RANDOM
    tokens: int = DEFAULT_TOKENS
    device: str = "cpu"
    seed: int = 0
    n_sink: int = N_SINK
    progress: Progress | None = None
    engine: str = "transformers"
    partial: Path | None = None
    tp: int = 1
    codec_options: Mapping[str, str] | None = None
    context: int | None = None
    bits: float | None = None
    images: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_dir", Path(self.model_dir))  # a str is welcome

    def source(self) -> Tokens:
        """The tokens of ``data``. Raises CalibrationError if they cannot be had."""
        return load_tokens(self.data, self.model_dir, self.tokens, self.seed)
