"""Quality of the served cache: KL, top-1 agreement and NLL difference, from the pool itself.

    python -m scripts.eval_pool --model DIR --artifact FILE [--artifact FILE ...] \\
        --tokens NPZ [--documents NAME,...] [--context 2048] [--json OUT]

Documents are the NPZ's ``test_*`` keys. Each artifact runs in a process of its own, because
SGLang keeps one configuration per process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path


def measure(model_dir: Path, artifact: Path, documents: dict[str, list[int]]) -> dict:
    from transformers import AutoModelForCausalLM

    from scripts.lib.inprocess import Runner
    from scripts.lib.pool_quality import compare, exact_logprobs, pool_logprobs

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    exact = {name: exact_logprobs(model, ids) for name, ids in documents.items()}
    del model
    size = sum(len(ids) for ids in documents.values()) + 64
    runner = Runner(model_dir, artifact, max_total_tokens=size, rows=len(documents) + 1)
    found = {}
    for row, (name, ids) in enumerate(documents.items(), start=1):
        found[name] = compare(exact[name], pool_logprobs(runner, row, ids), ids)._asdict()
    mean = {k: statistics.mean(d[k] for d in found.values()) for k in ("kl", "top1", "dnll")}
    stats = runner.pool.stats()
    return {
        "codec": stats["codec"],
        "artifact": stats["artifact"],
        "bits": stats["bits_per_element"],
        **mean,
        "documents": found,
    }


def load_documents(npz: Path, names: list[str] | None, context: int) -> dict[str, list[int]]:
    import numpy as np

    with np.load(npz) as z:
        keys = names or [k for k in z.files if k.startswith("test_")]
        return {k: z[k][:context].tolist() for k in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--documents", help="comma-separated test_* keys (default: all)")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len(args.artifact) == 1:
        names = args.documents.split(",") if args.documents else None
        documents = load_documents(args.tokens, names, args.context)
        results = [measure(args.model, args.artifact[0], documents)]
    else:
        results = [_in_own_process(args, artifact) for artifact in args.artifact]
    for r in results:
        print(
            f"{r['codec']:10} {r['bits']:.3f} bits  KL {r['kl']:.4f}  top-1 {r['top1']:.1%}  "
            f"dNLL {r['dnll']:+.4f}  ({len(r['documents'])} documents)"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def _in_own_process(args: argparse.Namespace, artifact: Path) -> dict:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "scripts.eval_pool", "--json", out, "--model", args.model]
        command += ["--artifact", artifact, "--tokens", args.tokens]
        command += ["--context", str(args.context)]
        if args.documents:
            command += ["--documents", args.documents]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())[0]


if __name__ == "__main__":
    main()
