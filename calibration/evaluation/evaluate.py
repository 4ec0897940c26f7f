"""``evaluate(options)``: a model directory and files in, the JSON of a finished evaluation out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...artifact.file import Fingerprint, check, load
from ...artifact.fingerprint import read_config
from ...kernels.layout import PADDED_HEAD_DIMS
from ..collect import Progress, check_supported, load_model
from ..data import RANDOM
from ..engines import observe
from ..errors import CalibrationError
from ..fit import N_SINK
from ..methods import Job, find_method, method_of, parse_jobs, sweep_jobs
from ..model_fit import Fitter
from ..pipeline import context_length
from ..plan import DEFAULT_TOKENS, Plan
from .inputs import load_inputs
from .results import results
from .run import EXACT, Record, Report, run


@dataclass(frozen=True)
class Options:
    """What is asked for; paths as the user gave them. See ``oscar-sglang eval --help``."""

    model: Path
    codecs: str | None = None
    contexts: tuple[int, ...] = (2048,)
    tokens: Path | None = None
    documents: tuple[str, ...] | None = None
    texts: tuple[Path, ...] = ()
    recall: Path | None = None
    artifact: Path | None = None
    calibration: str = RANDOM
    calibration_tokens: int = DEFAULT_TOKENS
    sink: int = 64
    recent: int = 256
    greedy: int = 64
    sweep: bool = False
    concurrency: int = 32
    device: str = "cpu"
    seed: int = 0
    json: Path | None = None


def evaluate(
    options: Options,
    report: Report | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run what ``options.json`` does not hold yet, and return the whole evaluation.

    ``report`` is called after every item, ``progress`` during calibration.
    """
    fingerprint = Fingerprint.of(options.model)
    check_supported(options.model, fingerprint.head_dim)
    if fingerprint.head_dim in PADDED_HEAD_DIMS:
        raise CalibrationError(
            f"{options.model}: evaluation is not made for heads of {fingerprint.head_dim} "
            "channels, which are served in rows of 128"
        )
    fitted, source = _artifact(options, fingerprint)
    jobs = _jobs(options, fitted)
    inputs = load_inputs(
        options.model,
        options.contexts,
        tokens=options.tokens,
        documents=options.documents,
        texts=options.texts,
        recall=options.recall,
        greedy=options.greedy,
    )
    setup = _setup(options, fingerprint, source)
    record = Record.resume(setup, options.json, inputs.hashes)
    model = load_model(options.model, options.device)

    def moments():
        needed = [j.method for j in jobs if j.method.needs_stats and j.method.name not in fitted]
        if not needed:
            return {"moments": [None] * fingerprint.layers}
        if options.artifact:
            raise CalibrationError(
                f"--codecs: {needed[0].name} must be calibrated, and --artifact holds "
                f"{', '.join(fitted)}; give --calibration instead of --artifact"
            )
        plan = Plan(
            options.model,
            options.calibration,
            options.calibration_tokens,
            options.device,
            options.seed,
            progress=progress,
        )
        context = max(context_length(read_config(options.model)), *options.contexts)
        mixed = [method.name for method in needed if method.mixed]
        fit = Fitter(mixed[0], context, N_SINK, progress) if mixed else None
        seen = observe(model, plan, plan.source(), fit)
        return {"moments": seen.moments, "scores": seen.scores, "context": context}

    run(model, jobs, inputs, record, moments, report, fitted)
    found = results(record)
    for row in found:
        row |= _memory(row, fingerprint, options.concurrency)
    head = {"tool": f"oscar_sglang {__version__}", "concurrency": options.concurrency}
    record.save(**head, results=found)
    return {"setup": setup, **head, "results": found, "profile": record.profile}


def _artifact(options: Options, fingerprint: Fingerprint) -> tuple[dict[str, list], str]:
    """Parameters by method, and where they came from."""
    if options.artifact is None:
        return {}, f"{Path(options.calibration).name}, {options.calibration_tokens} tokens"
    artifact = load(options.artifact)
    check(artifact, fingerprint)
    name = method_of(artifact.codec, artifact.options).name
    return {name: artifact.codecs}, f"artifact {artifact.id}"


def _jobs(options: Options, fitted: dict[str, list]) -> list[Job]:
    codecs = options.codecs or (",".join(fitted) if fitted else "feedback")
    jobs = parse_jobs(codecs, options.sink, options.recent)
    return sweep_jobs(jobs) if options.sweep else jobs


def _setup(options: Options, fingerprint: Fingerprint, source: str) -> dict[str, Any]:
    """What must agree for items of an earlier run to be used."""
    return {
        "model": options.model.resolve().name,
        "fingerprint": fingerprint.key,
        "layers": fingerprint.layers,
        "heads": fingerprint.heads,
        "kv_heads": fingerprint.kv_heads,
        "head_dim": fingerprint.head_dim,
        "calibration": source,
        "seed": options.seed,
        "sink": options.sink,
        "recent": options.recent,
        "greedy": options.greedy,
        "device": options.device,
    }


def _memory(row: dict[str, Any], f: Fingerprint, concurrency: int) -> dict[str, Any]:
    """Bytes of the exact windows of ``concurrency`` requests, and bits per element of one
    request with them: every token has its packed row, window tokens a 16-bit one besides."""
    if row["method"] == EXACT.label:
        return {"window_bytes": 0, "bits_with_windows": row.get("bits")}
    block = find_method(row["method"]).block
    exact = row["sink"] + row["recent"] + (block if block > 1 else 0)
    row_bytes = f.layers * f.kv_heads * 2 * f.head_dim * 2
    found: dict[str, Any] = {"window_bytes": concurrency * exact * row_bytes}
    if row.get("bits") and row["context"]:
        found["bits_with_windows"] = round(row["bits"] + 16 * min(1.0, exact / row["context"]), 3)
    return found
