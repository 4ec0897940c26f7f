"""Every method by name, in the order in which tables list them, and how a run names them.

``NAME`` runs a method with the windows of the run, ``NAME@SINK+RECENT`` with windows of its own,
as published or as deployed: ``fp8@0+0``, ``omni@0+128``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.codec import CODECS
from .baselines.fp8 import Fp8
from .baselines.per_channel import PerChannel
from .baselines.per_token import PerToken
from .baselines.turboquant import TurboQuant
from .errors import CalibrationError
from .method import Method, TwoSided
from .served import OscarProxy, Served


def _uniform(name: str, summary: str, k, v=None) -> Method:
    return TwoSided(name, summary, k, v or k)


def _all() -> list[Method]:
    return [
        _uniform("fp8", "8-bit floating point, as SGLang's fp8_e4m3", Fp8()),
        _uniform("int4-hadamard", "4 bits per token after a Hadamard", PerToken(4, True)),
        _uniform("turboquant-3", "random rotation, Lloyd-Max, 3 bits", TurboQuant(3)),
        _uniform("turboquant-2.5", "the same, half the channels at 3 bits", TurboQuant(2.5)),
        _uniform("turboquant-2", "the same at 2 bits", TurboQuant(2)),
        _uniform("naive", "2 bits per token, minimum to maximum", PerToken(2, False)),
        _uniform("quarot", "naive after a Hadamard", PerToken(2, True)),
        TwoSided("kivi", "K per channel over 128 tokens", PerChannel(128), PerToken(2, False)),
        TwoSided("kivi-g32", "K per channel over 32 tokens", PerChannel(32), PerToken(2, False)),
        TwoSided(
            "kitty",
            "kivi with 1/8 of the K channels at 4 bits",
            PerChannel(128, boosted=0.125),
            PerToken(2, False),
        ),
        OscarProxy(),
        *(Served(c.name) for c in sorted(CODECS.values(), key=lambda c: c.family == "ours")),
    ]


METHODS = {m.name: m for m in _all()}
# Parts of ``omni``, for the ablation of its paper; a run must name them, "all" leaves them out.
ABLATIONS = {
    m.name: m
    for m in (
        Served("omni", "omni-rotation", "omni without its token norm", norm="none"),
        Served("omni", "omni-scaling", "omni without its rotation", rotation="none"),
        Served(
            "omni",
            "omni-channels",
            "omni without either: K per channel",
            norm="none",
            rotation="none",
        ),
    )
}
PUBLISHED_WINDOWS = (
    "fp8@0+0",
    "int4-hadamard@0+0",
    "turboquant-3@0+0",
    "turboquant-2.5@0+0",
    "turboquant-2@0+0",
    "naive@0+0",
    "quarot@0+0",
    "kivi@0+128",
    "kitty@0+128",
    "omni@0+128",
)


SWEEP_SINK = (0, 4, 16, 64, 128)
SWEEP_RECENT = (64, 128, 256, 512)


@dataclass(frozen=True)
class Job:
    """A method with the exact windows it is run with; ``label`` is how tables call it, ``swept``
    marks those that only a sweep over window sizes asks for."""

    label: str
    method: Method | None
    n_sink: int
    n_recent: int
    swept: bool = False

    def windows(self) -> dict[str, str | int | bool]:
        """What tables and files say about it."""
        name = self.method.name if self.method else self.label
        return {"method": name, "sink": self.n_sink, "recent": self.n_recent, "swept": self.swept}


def parse_jobs(text: str, n_sink: int, n_recent: int) -> list[Job]:
    """``all`` or a comma-separated list of names. Raises CalibrationError for unknown ones."""
    names = [*METHODS, *PUBLISHED_WINDOWS] if text == "all" else text.split(",")
    return [_job(name.strip(), n_sink, n_recent) for name in dict.fromkeys(names)]


def sweep_jobs(jobs: list[Job]) -> list[Job]:
    """Every job with other sinks at its own recent window, and the other way round."""
    found = {}
    for job in jobs:
        found[job.label] = job
        name, s, r = job.method.name, job.n_sink, job.n_recent
        windows = [(sink, r) for sink in SWEEP_SINK] + [(s, recent) for recent in SWEEP_RECENT]
        for sink, recent in windows:
            label = f"{name}@{sink}+{recent}"
            if (sink, recent) != (s, r):
                found.setdefault(label, Job(label, job.method, sink, recent, swept=True))
    return list(found.values())


def _job(text: str, n_sink: int, n_recent: int) -> Job:
    name, at, windows = text.partition("@")
    method = find_method(name)
    if method is None:
        raise CalibrationError(
            f"--codecs: unknown codec {name!r}; known: all, {', '.join((*METHODS, *ABLATIONS))}"
        )
    if at:
        try:
            n_sink, n_recent = (int(n) for n in windows.split("+"))
            if min(n_sink, n_recent) < 0:
                raise ValueError
        except ValueError:
            raise CalibrationError(
                f"--codecs: {text!r}: expected NAME@SINK+RECENT with two numbers of tokens"
            ) from None
    return Job(text, method, n_sink, n_recent)


def find_method(name: str) -> Method | None:
    return METHODS.get(name) or ABLATIONS.get(name)


def family(name: str) -> str:
    """``Method.family`` of a method; of one that is not known any more, ``baseline``."""
    method = find_method(name)
    return method.family if method else "baseline"


def method_of(codec: str, options: dict[str, Any]) -> Method:
    """What judges an artifact of ``codec`` with these options."""
    chosen = CODECS[codec].meta.chosen(options)
    variants = (m for m in ABLATIONS.values() if m.spec.name == codec)
    return next(m for m in (METHODS[codec], *variants) if m.options == chosen)
