"""SGLang's KL gate for cached prefixes on servers with different caches, one after the other.

    python -m scripts.eval_kl_gate --model DIR --text NPZ:KEY... [--caches stock,int2,position]
                                   [--new-tokens 64 --groups 2 ...] [--json OUT] [-- SERVER FLAGS]

What is measured and by whose code: ``oscar_sglang/health/kl_gate.py``, which
``oscar-sglang verify --url`` runs on one server. "stock" is SGLang's own cache with the plugin idle
(FlashAttention-3, on a CPU torch), so its figure is what rounding alone gives; "fp8" needs a GPU.
Results of other models in the JSON file are kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from oscar_sglang.cli.verify import add_sizes, gate_table, sizes_of
from oscar_sglang.launch_server import enter_cpu_mode, has_gpu
from scripts.lib.endurance import device_name
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.shapes import CACHES as GPU

INT2 = ["--kv-cache-dtype", "int2"]
CACHES = {
    "stock": GPU["bf16"] if has_gpu() else ["--attention-backend", "torch_native"],
    "fp8": GPU["fp8"],
    "int2": INT2,
    "position": [*INT2, "--oscar-codec", "position"],
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--caches", default="stock,int2,position", help=f"of {', '.join(CACHES)}")
    p.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    p.add_argument("--commit", help="of the code, where git does not know it")
    add_sizes(p)
    own = sys.argv[1:]
    stop = own.index("--") if "--" in own else len(own)
    args = p.parse_args(own[:stop])
    args.flags, args.caches = own[stop + 1 :], args.caches.split(",")
    if unknown := set(args.caches) - set(CACHES):
        p.error(f"{unknown.pop()} is none of {', '.join(CACHES)}")
    return args


def main() -> int:
    args = parse()
    if not has_gpu():
        enter_cpu_mode()  # before anything imports sglang
    from oscar_sglang.health import kl_gate

    sizes, found, rows, earlier = sizes_of(args), {}, [], []
    if args.json and args.json.exists():
        data = json.loads(args.json.read_text())
        rows, earlier = data["rows"], [*data.get("earlier_commands", []), data["command"]]
    rows = [r for r in rows if r["model"] != args.model.name or r["cache"] not in args.caches]
    for cache in args.caches:
        flags, began = [*CACHES[cache], *args.flags], time.monotonic()
        with Server(args.model, args.log_dir / f"{cache}.log", *flags, timeout=900) as server:
            url = f"http://127.0.0.1:{server.port}"
            texts, vocab = kl_gate.documents(args.model, args.text, sizes)
            results = list(kl_gate.measure(url, texts, vocab, sizes, say=print))
        found[cache] = results
        about = {"model": args.model.name, "cache": cache, "flags": shlex.join(flags)}
        about |= {"sizes": vars(sizes), "seconds": round(time.monotonic() - began)}
        rows += [about | kl_gate.as_dict(r) for r in results]
        if args.json:
            result = header(device_name(), args.commit) | {
                "earlier_commands": earlier,
                "baselines": ["stock: SGLang's own cache, the same prompts"],
                "thresholds": kl_gate.CI_THRESHOLDS,
                "rows": rows,
            }
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(gate_table(found))
    return int(any(r.kl > args.limit for results in found.values() for r in results))


if __name__ == "__main__":
    sys.exit(main())
