"""All methods on all units, one exact pass per document; every figure is kept as soon as known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..continuation import Cache
from ..errors import CalibrationError
from ..methods import Job
from .inputs import Inputs
from .profile import profile
from .units import Text

EXACT = Job("exact", None, 0, 0)  # the cache as it is: what the others are compared with

# (label, unit key, figures) of a finished item, with (done, total) items
Report = Callable[[str, str, dict[str, Any], int, int], None]


@dataclass
class Record:
    """Figures by unit key and job label, mirrored in a JSON file after every item.

    setup   what has to agree with an earlier run for its items to be used
    hashes  of the ids of every unit, by key
    jobs    method and windows by label, of this run and earlier ones
    """

    setup: dict[str, Any]
    path: Path | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: dict[str, dict[str, dict]] = field(default_factory=dict)
    profile: dict[str, Any] | None = None

    @classmethod
    def resume(cls, setup: dict[str, Any], path: Path | None, hashes: dict[str, str]) -> Record:
        """Continue what ``path`` holds if it was made with the same ``setup`` and documents; its
        contexts and codecs may be others."""
        if path is None or not path.exists():
            return cls(setup, path, hashes)
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            before, documents = old["setup"], old["hashes"]
            jobs, items = dict(old["jobs"]), dict(old["items"])
        except (ValueError, KeyError, TypeError):
            raise CalibrationError(
                f"{path}: exists and is not an evaluation of oscar-sglang; choose another file"
            ) from None
        changed = [(k, before.get(k), v) for k, v in setup.items() if before.get(k) != v]
        changed += [
            (f"document {k}", documents[k], v)
            for k, v in hashes.items()
            if documents.get(k, v) != v
        ]
        for name, was, now in changed[:1]:
            raise CalibrationError(
                f"{path}: holds an evaluation with another {name} ({was!r}, now {now!r}); delete "
                "it or choose another file"
            )
        return cls(setup, path, documents | hashes, jobs, items, old.get("profile"))

    def has(self, key: str, label: str) -> bool:
        return label in self.items.get(key, {})

    def add(self, key: str, label: str, figures: dict) -> None:
        self.items.setdefault(key, {})[label] = figures
        self.save()

    def save(self, **more: Any) -> None:
        if self.path is None:
            return
        content = {"setup": self.setup, **more}
        for name in ("profile", "hashes", "jobs", "items"):
            content[name] = getattr(self, name)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


def run(
    model: PreTrainedModel,
    jobs: list[Job],
    inputs: Inputs,
    record: Record,
    moments: Callable[[], dict[str, Any]],
    report: Report | None = None,
    fitted: dict[str, list] | None = None,
) -> None:
    """Fill ``record``. ``moments`` gives what ``Method.fit_model`` takes and is called once, if a
    method has still to be fitted; ``fitted`` gives parameters that need no fitting (those of an
    artifact) by method name."""
    jobs = [EXACT, *jobs]
    record.jobs |= {job.label: job.windows() for job in jobs}
    params = dict(fitted or {})
    total, done = len(jobs) * len(inputs.units), 0
    for unit in inputs.units:
        pending = [job for job in jobs if not record.has(unit.key, job.label)]
        done += len(jobs) - len(pending)
        if not pending:
            continue
        _fit(pending, params, moments)
        document = unit.capture(model)
        if record.profile is None and isinstance(unit, Text):
            record.profile = profile(document)
        for job in pending:
            cache = _cache(document, job, params, unit.queries)
            figures = unit.measure(cache) | {"bits": cache.bits}
            record.add(unit.key, job.label, figures)
            done += 1
            if report:
                report(job.label, unit.key, figures, done, total)


def _fit(jobs: list[Job], params: dict[str, list], moments) -> None:
    missing = {j.method.name: j.method for j in jobs if j.method and j.method.name not in params}
    if not missing:
        return
    known = moments()
    for name, method in missing.items():
        params[name] = method.fit_model(**known)


def _cache(document, job: Job, params: dict[str, list], queries: int) -> Cache:
    fitted = params[job.method.name] if job.method else []
    return Cache(document, job.method, fitted, job.n_sink, job.n_recent, queries)
