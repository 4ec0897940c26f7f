"""Serving speed of BF16, FP8 and 2-bit caches on one GPU, same memory fraction, one run.

    python scripts/bench_serving.py [--shape qwen3-8b] [--layers N] [--caches bf16,fp8,int2]
                                    [--json OUT]

Random (dummy) weights of the named shape at full depth: latency and memory are those of the real
model, its text is not. Each cache gets a server of its own with SGLang's best default backend
(FlashAttention-3 on a Hopper; page size 64 for FP8, which is slow at SGLang's default of 1). Rows:

    decode  time per output token, batch x context, every prompt a full prefix hit of one document
    ttft    time to first token of a 128-token turn on a cached prefix
    prefill tokens per second of a fresh 8k prompt
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lib"))
from server import Server  # noqa: E402

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    torch_dtype="bfloat16",
    head_dim=128,
    num_key_value_heads=8,
    num_attention_heads=32,
    num_hidden_layers=36,
    vocab_size=151936,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    rope_theta=1000000,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
)
SHAPES = {
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
}
CACHES = {
    "bf16": ["--attention-backend", "fa3"],
    "fp8": ["--attention-backend", "fa3", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "64"],
    "int2": ["--kv-cache-dtype", "int2"],
}
DECODE = ((1024, 1), (32768, 1), (102400, 1), (32768, 8), (32768, 32))
TTFT = 102400
SHORT, LONG = 8, 72  # output tokens; TPOT is the difference over LONG - SHORT


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30000) for _ in range(n)]


def timed(server: Server, ids: list[int], new_tokens: int) -> float:
    start = time.perf_counter()
    answer = server.generate(ids, new_tokens)
    assert len(answer["output_ids"]) == new_tokens
    return time.perf_counter() - start


def batch_time(server: Server, ids: list[int], batch: int, new_tokens: int) -> float:
    """Wall time of ``batch`` equal requests sent as one."""
    start = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": [ids] * batch, "sampling_params": sampling}
    answers = server.request("/generate", body, timeout=900)
    assert [len(a["output_ids"]) for a in answers] == [new_tokens] * batch
    return time.perf_counter() - start


def decode_tpot(server: Server, ids: list[int], batch: int, repeats: int = 3) -> float:
    """Median milliseconds per output token and request."""
    found = []
    for _ in range(repeats):
        short = batch_time(server, ids, batch, SHORT)
        found.append((batch_time(server, ids, batch, LONG) - short) / (LONG - SHORT) * 1e3)
    return statistics.median(found)


def measure(server: Server, cache: str, shape: str, contexts) -> list[dict]:
    base = {"cache": cache, "model": shape}
    held = server.internal_state()["memory_usage"]["token_capacity"]
    rows = [{**base, "scenario": "memory", "tokens_held": held}]
    fresh = [timed(server, tokens(8192, 100 + i), 1) for i in range(4)][1:]
    tput = 8192 / statistics.median(fresh)
    rows.append({**base, "scenario": "prefill", "context": 8192, "tokens_per_s": round(tput)})
    document = tokens(max(c for c, _ in contexts), 1)
    for context, batch in contexts:
        ids = document[:context]
        timed(server, ids, 1)  # fill the prefix cache
        tpot = decode_tpot(server, ids, batch)
        row = {**base, "scenario": "decode", "context": context, "batch": batch}
        rows.append({**row, "tpot_ms": round(tpot, 3)})
        print(rows[-1], flush=True)
    prefix = document[:TTFT]
    timed(server, prefix, 1)
    turns = [timed(server, prefix + tokens(128, 200 + i), 1) for i in range(5)]
    ttft = statistics.median(turns) * 1e3
    rows.append({**base, "scenario": "ttft", "context": len(prefix), "ttft_ms": round(ttft, 1)})
    print(rows[-1], flush=True)
    return rows


def add_speedups(rows: list[dict]) -> None:
    """``speedup_bf16`` and ``speedup_fp8`` of each int2 row, against the same scenario."""
    fields = (("tpot_ms", -1), ("ttft_ms", -1), ("tokens_per_s", 1), ("tokens_held", 1))
    key = lambda r: (r["scenario"], r.get("context"), r.get("batch"))  # noqa: E731
    for row in rows:
        if row["cache"] != "int2":
            continue
        for other in rows:
            if other["cache"] != "int2" and key(other) == key(row):
                for field, sign in fields:
                    if field in row:
                        ratio = (row[field] / other[field]) ** sign
                        row[f"speedup_{other['cache']}"] = round(ratio, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--caches", default="bf16,fp8,int2")
    parser.add_argument("--mem-fraction", default="0.5")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    config = dict(SHAPES[args.shape])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    common = ["--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "131072"]
    common += ["--mem-fraction-static", args.mem_fraction, "--max-running-requests", "32"]
    common += ["--cuda-graph-max-bs", "32"]
    rows = []
    for cache in args.caches.split(","):
        log = args.log_dir / f"server-{cache}.log"
        with Server(folder, log, *common, *CACHES[cache], timeout=400) as server:
            rows += measure(server, cache, args.shape, DECODE)
        _save(args, rows)


def _save(args: argparse.Namespace, rows: list[dict]) -> None:
    import torch

    rows = [dict(r) for r in rows]
    add_speedups(rows)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "triton", "sglang")},
        "commit": commit.stdout.strip(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "weights": "dummy (random): speed only",
        "layers": args.layers or SHAPES[args.shape]["num_hidden_layers"],
        "rows": rows,
    }
    for row in rows:
        print(row)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
