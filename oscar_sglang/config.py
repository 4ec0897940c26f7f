"""The one validated configuration object, and the only reader of our flags and environment.

Flags exist twice: as ``--oscar-*`` on SGLang's command line and as ``oscar_*`` keywords of
``sglang.Engine``. Both end in an ``OscarConfig``, which is written into the value of SGLang's own
``kv_cache_dtype`` ("int2?codec=aligned&recent_tokens=64"): whatever copies, pickles or prints
``ServerArgs`` then copies our options too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

KV_CACHE_DTYPE = "int2"
ATTENTION_BACKEND = "oscar"
DEFAULT_CODEC = "feedback"
_COUNTS = (
    "sink_tokens", "recent_tokens", "sink_cache_tokens", "scratch_tokens", "debug_tags_every",
    "parked_rows",
)  # fmt: skip
PREFIX_WINDOWS = ("reuse", "recompute", "park")
PREFILL_ATTENTION = ("fa3", "flashinfer")
# Field -> the values of ``codec_omni.OPTIONS``, the default first.
OMNI_CHOICES = {"omni_norm": ("head", "none"), "omni_rotation": ("hadamard", "none")}
ON_WEIGHT_UPDATE = ("recalibrate", "keep", "refuse")
_CHOICES = {
    "prefix_window": PREFIX_WINDOWS,
    "prefill_attention": PREFILL_ATTENTION,
    "on_weight_update": ON_WEIGHT_UPDATE,
}
PREFIX = "oscar_"
DISABLE_VARIABLE = "OSCAR_SGLANG_DISABLE"
KERNELS_VARIABLE = "OSCAR_SGLANG_KERNELS"


class OscarError(ValueError):
    """A user's mistake or an unsupported combination; the message says what to do."""


class CodecNames:
    """Names of ``codec.CODECS``, looked up when they are asked for: a parser that offers them is
    built without torch."""

    def __iter__(self) -> Iterator[str]:
        from .kernels.codec import CODECS

        return iter(CODECS)

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)


CODEC_NAMES = CodecNames()


@dataclass(frozen=True)
class OscarConfig:
    """What the user asked for. ``None`` means "chosen at start-up".

    codec              default: the artifact's, where one is named, else ``DEFAULT_CODEC``
    artifact           path of a calibrated artifact, or "auto"
    sink_tokens        exact first positions of a request
    recent_tokens      exact last positions of a request
    sink_cache_tokens  rows of the exact sink store behind the prefix cache
    scratch_tokens     prefix tokens materialised at a time during prefill
    prefix_window      after a prefix hit "recompute" the last ``recent_tokens`` of the prompt, or
                       "reuse" all that is cached, and read their recent window as codes, or "park":
                       take over the exact window from the ring of the request that left it
                       (``parking.py``), and recompute only where it is gone. Default:
                       recompute, but reuse in hybrid models: their linear layers can only go on
                       from where a state was kept, which is seldom ``recent_tokens`` earlier
    parked_rows        with "park", request rows beside those of running requests, whose rings
                       outlive their requests
    prefill_attention  library of prefill attention on a GPU, of PREFILL_ATTENTION (default: the
                       first that the GPU has)
    debug_tags         check reads against what was written (``watch/``)
    debug_tags_every   on a GPU: steps between two checks; a CPU checks every step
    on_weight_update   after new weights in the running server "recalibrate", "keep" the calibration
                       of the old ones, or "refuse" the update
                       (``plugin/weight_updates.py``); default: recalibrate, but keep with codec
                       ``position``
    omni_norm, omni_rotation  codec ``omni`` without its token norm or its rotation, as in its
                       paper's ablation (default: the artifact's, else with both)
    bits               per element of history that codec ``position`` may take (default: what its
                       calibration chooses by itself)
    """

    codec: str | None = None
    artifact: str = "auto"
    sink_tokens: int = 64
    recent_tokens: int = 256
    sink_cache_tokens: int | None = None
    scratch_tokens: int | None = None
    prefix_window: str | None = None
    parked_rows: int | None = None
    prefill_attention: str | None = None
    debug_tags: bool = False
    debug_tags_every: int | None = None
    on_weight_update: str | None = None
    omni_norm: str | None = None
    omni_rotation: str | None = None
    bits: float | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and self.codec not in CODEC_NAMES:
            raise OscarError(
                f"--oscar-codec {self.codec!r} is unknown; choose one of {', '.join(CODEC_NAMES)}"
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise OscarError(
                    f"{flag(name)} must be a whole number of at least 1, got {value!r}; drop it "
                    "for the default (sink 64 and recent 256: quality needs both windows)"
                )
        for name, values in _CHOICES.items():
            value = getattr(self, name)
            if value not in (None, *values):
                raise OscarError(
                    f"{flag(name)} {value!r} is unknown; choose one of {', '.join(values)}"
                )
        if not isinstance(self.debug_tags, bool):
            raise OscarError(f"{flag('debug_tags')} is on or off, got {self.debug_tags!r}")
        if self.debug_tags_every is not None and not self.debug_tags:
            raise OscarError(
                f"{flag('debug_tags_every')} needs {flag('debug_tags')}; add or drop it"
            )
        if self.parked_rows is not None and self.prefix_window != "park":
            raise OscarError(f"{flag('parked_rows')} needs {flag('prefix_window')} park")
        for name, values in OMNI_CHOICES.items():
            value = getattr(self, name)
            if value not in (None, *values):
                raise OscarError(f"{flag(name)} {value!r} is unknown; choose {' or '.join(values)}")
            if value is not None and self.codec not in (None, "omni"):
                raise OscarError(
                    f"{flag(name)} belongs to codec omni, not to {self.codec}; drop it or give "
                    "--oscar-codec omni"
                )

        if self.bits is None:
            return
        if isinstance(self.bits, bool) or not 2 <= self.bits <= 8:
            raise OscarError(
                f"{flag('bits')} is bits per element, e.g. 2.3, got {self.bits!r}; drop it for the "
                "default"
            )
        if self.codec not in (None, "position"):
            raise OscarError(
                f"{flag('bits')} belongs to codec position, not to {self.codec}; drop it or give "
                "--oscar-codec position"
            )

    @property
    def omni_options(self) -> dict[str, str]:
        """Options of ``codec_omni.OPTIONS`` that were given."""
        given = {n.removeprefix("omni_"): getattr(self, n) for n in OMNI_CHOICES}
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> OscarConfig:
        """From ``oscar_*`` options; absent or None values keep their default."""
        known = {f.name for f in fields(cls)}
        given = {k.removeprefix(PREFIX): v for k, v in options.items() if v is not None}
        if unknown := sorted(set(given) - known):
            raise OscarError(
                f"unknown option(s) {', '.join(PREFIX + u for u in unknown)}; known: "
                f"{', '.join(PREFIX + k for k in sorted(known))}"
            )
        return cls(**given)

    @property
    def dtype(self) -> str:
        """The value of ``kv_cache_dtype`` that carries this configuration."""
        defaults = OscarConfig()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        query = urlencode({k: v for k, v in given.items() if v != getattr(defaults, k)}, safe="/")
        return f"{KV_CACHE_DTYPE}?{query}" if query else KV_CACHE_DTYPE

    def with_artifact(self, path: Path, codec: str) -> OscarConfig:
        return replace(self, artifact=str(path), codec=codec)

    def with_weight_update(self, codec: str) -> OscarConfig:
        """With the default of ``codec``. Raises OscarError for what it cannot do."""
        from .kernels.codec import CODECS

        mixed = CODECS[codec].meta.mixed
        if mixed and self.on_weight_update == "recalibrate":
            raise OscarError(
                f"{flag('on_weight_update')} recalibrate is not built for codec {codec}, whose "
                "bits would move between layers in a running cache; give keep or refuse"
            )
        default = "keep" if mixed else "recalibrate"
        return replace(self, on_weight_update=self.on_weight_update or default)

    def with_prefix_window(self, hybrid: bool) -> OscarConfig:
        """With the default of the model's kind, if none was asked for."""
        default = "reuse" if hybrid else "recompute"
        return replace(self, prefix_window=self.prefix_window or default)


@lru_cache
def config_of_dtype(dtype: str | None) -> OscarConfig | None:
    """The configuration inside a value of ``kv_cache_dtype``; None if it is not int2's."""
    name, _, query = (dtype or "").partition("?")
    if name != KV_CACHE_DTYPE:
        return None
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for key, value in options.items():
        if key in _COUNTS and value.isdecimal():
            options[key] = int(value)
        elif key == "debug_tags" and value in ("True", "False"):
            options[key] = value == "True"
        elif key == "bits":
            options[key] = float(value)
    return OscarConfig.from_options({PREFIX + key: value for key, value in options.items()})


def fold_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` of ServerArgs with their ``oscar_*`` moved into ``kv_cache_dtype``."""
    options = {k: v for k, v in kwargs.items() if k.startswith(PREFIX)}
    rest = {k: v for k, v in kwargs.items() if k not in options}
    given = {k: v for k, v in options.items() if v is not None}
    config = config_of_dtype(rest.get("kv_cache_dtype"))
    if config is None:
        if given:
            raise OscarError(
                f"{', '.join(given)} given without --kv-cache-dtype {KV_CACHE_DTYPE}; add it "
                "or drop them"
            )
        return rest
    before = {PREFIX + f.name: getattr(config, f.name) for f in fields(config)}
    rest["kv_cache_dtype"] = OscarConfig.from_options({**before, **given}).dtype
    return rest


def flag(field: str) -> str:
    return "--" + (PREFIX + field).replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--oscar-*``; defaults are None, so that a given flag can be told from a default."""
    d = OscarConfig()
    group = parser.add_argument_group("oscar: 2-bit KV cache (with --kv-cache-dtype int2)")
    add = group.add_argument
    add(
        flag("codec"),
        choices=CODEC_NAMES,
        metavar="CODEC",
        help=f"2-bit codec: %(choices)s (default: the artifact's, else {DEFAULT_CODEC})",
    )
    add(
        flag("artifact"),
        metavar="PATH|auto",
        help="calibrated artifact; auto finds or makes one in the cache directory (default auto)",
    )
    add(flag("sink_tokens"), type=int, help=f"exact first tokens (default {d.sink_tokens})")
    add(flag("recent_tokens"), type=int, help=f"exact last tokens (default {d.recent_tokens})")
    add(
        flag("sink_cache_tokens"),
        type=int,
        help="exact sink rows for cached prefixes (default: 2 x sink tokens x running requests, or "
        "1%% of the memory if that is more)",
    )
    add(
        flag("scratch_tokens"),
        type=int,
        help="prefix tokens materialised at a time (default: context, <= 131072; 4096 on a CPU)",
    )
    add(
        flag("prefix_window"),
        choices=PREFIX_WINDOWS,
        help="after a prefix hit read the recent window as codes, compute it again exactly, or "
        "take it over from the request that left it (default recompute; reuse in models with "
        "linear-attention layers)",
    )
    add(
        flag("parked_rows"),
        type=int,
        help="with --oscar-prefix-window park, rows that keep windows of requests that are gone, "
        "beside the free ones (default: one per running request, at most 1/32 of the memory)",
    )
    add(
        flag("prefill_attention"),
        choices=PREFILL_ATTENTION,
        help="library of prefill attention on a GPU (default fa3 on sm_80 to sm_90, else "
        "flashinfer)",
    )
    add(
        flag("debug_tags"),
        action="store_true",
        default=None,
        help="stop with an error if attention ever reads another token than it should (slow)",
    )
    add(
        flag("debug_tags_every"),
        type=int,
        metavar="N",
        help="with --oscar-debug-tags on a GPU: check every N-th step (default 16; a CPU checks "
        "every step)",
    )
    add(
        flag("on_weight_update"),
        choices=ON_WEIGHT_UPDATE,
        help="after /update_weights_from_* measure a new calibration in the running server, keep "
        "that of the old weights, or refuse the update (default recalibrate; keep with codec "
        "position)",
    )
    add(
        flag("bits"),
        type=float,
        metavar="B",
        help="bits per element of codec position: what is over 2 bits and metadata gives some "
        "layers' K or V 4 bits (default 1/6 over; 2.29 at head_dim 128)",
    )
    for name, what in (("omni_norm", "token norm"), ("omni_rotation", "rotation")):
        add(
            flag(name),
            choices=OMNI_CHOICES[name],
            help=f"codec omni with or without its {what} (default {OMNI_CHOICES[name][0]})",
        )


def option_names() -> list[str]:
    return [PREFIX + f.name for f in fields(OscarConfig)]


def disabled() -> bool:
    """The kill switch: $OSCAR_SGLANG_DISABLE set to anything but 0, false, no or off."""
    value = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def portable_kernels() -> bool:
    """Whether $OSCAR_SGLANG_KERNELS asks for the Triton kernels where CUDA ones exist."""
    value = os.environ.get(KERNELS_VARIABLE, "cuda").strip().lower()
    if value not in ("cuda", "triton"):
        raise OscarError(f"${KERNELS_VARIABLE} is cuda or triton, got {value!r}")
    return value == "triton"
