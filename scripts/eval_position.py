"""What each part of codec ``position`` is worth, and how codecs stand the context.

    python -m scripts.eval_position --model DIR --calibration NPZ:KEY --tokens NPZ \\
        [--contexts 2048,8192] [--documents NAME,...] [--json OUT]

Calibrates once, on sequences as the file has them, and prints for every variant and context the
mean over documents of the KL from the exact cache (last 129 tokens, windows 64 and 256).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

VARIANTS = {
    "feedback": "today's default: fitted to the positions of its calibration",
    "hadamard": "position: the mean subtracted, a plain Hadamard",
    "still": "position: as if there were no RoPE, from moments after it",
    "short": "position: statistics of contexts as long as the calibration's sequences",
    "2 bits": "position without 4-bit slots",
    "position": "the whole codec",
    "wide": "position with 1/8 bit more for 4-bit slots",
}


def variants(moments, scores, context: int, sequence: int) -> dict[str, list]:
    """Codecs of all layers by name."""
    from oscar_sglang.calibration import fit_position
    from oscar_sglang.calibration.fit import N_SINK, fit_layer
    from oscar_sglang.calibration.model_fit import Fitter, wanted_bits, widen
    from oscar_sglang.calibration.stats import BeforeRope
    from oscar_sglang.kernels.codec_position import Rope
    from oscar_sglang.kernels.hadamard import hadamard

    d = moments[0].k_mean.shape[-1]
    bits, fits = wanted_bits(None, d), Fitter("position", context, N_SINK).fit(moments)

    def widened(extra: float) -> list:
        wide, _ = widen(fits, moments, scores, bits + extra, context, N_SINK)
        return [fit.codec for fit in wide]

    def without_turn(m):
        positions = m.before.held_positions
        seen = BeforeRope(Rope.still(d), m.k_mean, m.ktk, m.qtq, positions)
        return replace(m, before=seen)

    def plain(c, _m):
        return {"hadamard": hadamard(c.shape[-1]).expand_as(c)}

    found = {
        "feedback": [fit_layer(m, "feedback").codec for m in moments],
        "still": Fitter("position", context, N_SINK)([without_turn(m) for m in moments]),
        "short": Fitter("position", sequence, N_SINK)(moments),
        "2 bits": [fit.codec for fit in fits],
        "position": widened(0.0),
        "wide": widened(1 / 8),
    }
    chosen, fit_position.bases = fit_position.bases, plain
    try:
        found["hadamard"] = Fitter("position", context, N_SINK)(moments)
    finally:
        fit_position.bases = chosen
    return {name: found[name] for name in VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--documents", help="comma-separated test_* keys (default: all)")
    parser.add_argument("--contexts", default="2048,8192")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from oscar_sglang.calibration.collect import load_model
    from oscar_sglang.calibration.continuation import Cache, capture
    from oscar_sglang.calibration.engines import observe
    from oscar_sglang.calibration.evaluation.units import ROWS, compare
    from oscar_sglang.calibration.fit import N_SINK
    from oscar_sglang.calibration.methods import METHODS
    from oscar_sglang.calibration.model_fit import Fitter
    from oscar_sglang.calibration.plan import Plan
    from scripts.eval_pool import load_documents

    contexts = [int(n) for n in args.contexts.split(",")]
    longest = max(contexts)
    model = load_model(args.model, "cpu")
    plan = Plan(args.model, args.calibration, args.calibration_tokens)
    tokens = plan.source()
    seen = observe(model, plan, tokens, Fitter("position", longest, N_SINK))
    sequence = max(map(len, tokens.sequences))
    codecs = variants(seen.moments, seen.scores, longest, sequence)
    names = args.documents.split(",") if args.documents else None
    rows: dict[str, dict[str, dict]] = {name: {} for name in args.variants.split(",")}
    for context in contexts:
        for name, ids in load_documents(args.tokens, names, context).items():
            ids = torch.tensor(ids)
            document = capture(model, ids, ROWS)
            for variant, found in rows.items():
                method = METHODS["feedback" if variant == "feedback" else "position"]
                cache = Cache(document, method, codecs[variant], N_SINK, 256, ROWS)
                figures = compare(document.logits, cache.logits(ids[None, -ROWS:])[0], ids[-ROWS:])
                figures["bits"] = cache.bits
                found.setdefault(str(context), {})[name] = figures
                print(f"{context:6} {name:20} {variant:10} {figures['kl']:.4f}", flush=True)
    result = {"calibration": args.calibration, "fitted_for": longest, "variants": {}}
    for variant, found in rows.items():
        result["variants"][variant] = {"means": VARIANTS[variant]} | {
            context: {
                key: statistics.mean(f[key] for f in documents.values())
                for key in ("kl", "top1", "bits")
            }
            | {"documents": {n: f["kl"] for n, f in documents.items()}}
            for context, documents in found.items()
        }
        shown = "  ".join(
            f"{context}: {result['variants'][variant][context]['kl']:.4f}" for context in found
        )
        print(f"{variant:10} KL  {shown}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
