"""Where a decode step and a short turn spend their time on the GPU, and how often they synchronise.

    python -m scripts.profile_serving [--shape qwen3-8b] [--context 102400] [--caches int2,bf16]
                                      [--json OUT] [--commit HASH]

Starts each server as ``bench_serving.py`` does, traces one 128-token turn on a cached prefix and
one short decode with SGLang's own ``/start_profile``, and reports GPU time by kernel, the span from
the first kernel to the last, and the host's waits (``cudaStreamSynchronize`` and the like).
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import tempfile
from pathlib import Path

from scripts.lib import endurance
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.shapes import CACHES, SHAPES, UNCHECKED, common_arguments, model_folder, tokens

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
DECODE_TOKENS = 24


def short_name(kernel: str) -> str:
    """A kernel's name without templates, arguments and namespaces."""
    name = re.sub(r"<.*", "", kernel.removeprefix("void ")).split("(")[0]
    return name.split("::")[-1][:48] or kernel[:48]


def trace(server: Server, ids: list[int], new_tokens: int) -> list[dict]:
    """Events of one request."""
    with tempfile.TemporaryDirectory() as folder:
        body = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False}
        server.request("/start_profile", body)
        server.generate(ids, new_tokens)
        server.request("/stop_profile", {})
        (file,) = Path(folder).rglob("*.trace.json.gz")
        return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def summarise(events: list[dict], steps: int, graphs_only: bool) -> dict:
    """Figures per step; ``graphs_only`` keeps the kernels of CUDA graphs (decode)."""
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    replays = {e["args"]["correlation"] for e in runtime if e["name"].startswith("cudaGraphLaunch")}
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if graphs_only:  # a decode graph holds all layers; prefill replays one small graph per layer
        sizes = collections.Counter(e["args"].get("correlation") for e in kernels)
        replays = {c for c in replays if sizes[c] > max(sizes[r] for r in replays) / 2}
        kernels = [e for e in kernels if e["args"].get("correlation") in replays]
        steps = len(replays)
        first = min(e["ts"] for e in runtime if e["args"]["correlation"] in replays)
        runtime = [e for e in runtime if e["ts"] >= first]
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for e in kernels:
        by_name[short_name(e["name"])].append(e["dur"])
    start = min(e["ts"] for e in kernels)
    span = max(e["ts"] + e["dur"] for e in kernels) - start
    waits = collections.Counter(e["name"] for e in runtime if e["name"].startswith(WAITS))
    calls = collections.defaultdict(list)
    for e in runtime:
        calls[e["name"]].append(e["dur"])
    return {
        "steps": steps,
        "span_ms": round(span / steps / 1e3, 3),
        "busy_ms": round(sum(e["dur"] for e in kernels) / steps / 1e3, 3),
        "launches": round(len(kernels) / steps, 1),
        "waits_per_step": {k: round(n / steps, 2) for k, n in waits.items()},
        "kernels": [
            {
                "name": name,
                "count": round(len(times) / steps, 1),
                "us": round(sum(times) / steps, 1),
                "each_us": round(sum(times) / len(times), 2),
            }
            for name, times in sorted(by_name.items(), key=lambda kv: -sum(kv[1]))[:24]
        ],
        "host_calls": {
            name: [round(len(times) / steps, 1), round(sum(times) / steps / 1e3, 3)]
            for name, times in sorted(calls.items(), key=lambda kv: -sum(kv[1]))[:8]
        },
    }


def profile(server: Server, context: int) -> dict:
    document = tokens(context, 1)
    server.generate(document, 4)
    server.generate(document + tokens(128, 2), 1)
    extend = trace(server, document + tokens(128, 3), 1)
    decode = trace(server, document, DECODE_TOKENS)
    return {"extend": summarise(extend, 1, False), "decode": summarise(decode, 1, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--context", type=int, default=102400)
    parser.add_argument("--caches", default="int2,bf16")
    parser.add_argument("--mem-fraction", default="0.5")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="of the code, where git does not know it")
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    folder = model_folder(args.shape, args.layers)
    found = {}
    for cache in args.caches.split(","):
        log = args.log_dir / f"profile-{cache}.log"
        flags = [*common_arguments(args.mem_fraction), *CACHES[cache]]
        with Server(folder, log, *flags, env=UNCHECKED, timeout=400) as server:
            found[cache] = profile(server, args.context)
        for stage, figures in found[cache].items():
            head = {k: v for k, v in figures.items() if k != "kernels"}
            print(cache, stage, json.dumps(head))
            for row in figures["kernels"]:
                times = f"{row['us']:9.1f} us {row['count']:7.1f} x {row['each_us']:8.2f}"
                print(f"  {times}  {row['name']}")
    if args.json:
        head = header(endurance.device_name(), args.commit)
        setup = {"model": args.shape, "layers": args.layers, "context": args.context}
        baselines = [c for c in found if c != "int2"]
        result = {**head, **setup, "baselines": baselines, "caches": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
