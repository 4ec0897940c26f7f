"""Does it matter what a codec is calibrated on? KL of ``feedback`` per source of tokens.

    python -m scripts.eval_sources --model DIR --tokens NPZ [--context N] [--json OUT] [SOURCE...]

Sources as in ``oscar-sglang calibrate --data``; by default prose, code, what the model samples
itself (``random:2048``) and plain uniform ids, all in sequences of 2048: K's mean after RoPE
depends on the positions it is taken over, so sources compare at one length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from oscar_sglang.calibration.evaluation.evaluate import Options, evaluate
from scripts.lib.provenance import header

KEYS = ("cal_tech", "cal_code", "cal_rand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="documents test_*")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tech, code, uniform = (f"{args.tokens}:{key}" for key in KEYS)
    rows = []
    for source in args.sources or (tech, code, "random:2048", uniform):
        options = Options(
            args.model,
            contexts=(args.context,),
            tokens=args.tokens,
            calibration=source,
            calibration_tokens=args.calibration_tokens,
            greedy=0,
        )
        found = {r["codec"]: r for r in evaluate(options)["results"]}["feedback"]
        row = {"source": Path(source).name, "codec": "feedback", "context": args.context}
        row |= {k: found[k] for k in ("kl", "top1", "documents", "bits")}
        rows.append(row | {"against_first": round(row["kl"] / rows[0]["kl"], 3) if rows else 1.0})
        print(rows[-1], flush=True)
    result = {
        **header("CPU", None, ("torch", "transformers")),
        "baselines": ["transformers, float32, exact cache"],
        "model": args.model.resolve().name,
        "calibration_tokens": args.calibration_tokens,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
