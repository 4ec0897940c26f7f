"""Does a server answer the same after its memory was taken away and given back? For a GPU.

    python -m scripts.check_memory_saver --model DIR [--log FILE]

Starts SGLang with --enable-memory-saver and an int2 cache, asks, releases first the cache and then
everything (/release_memory_occupation), resumes, and asks again each time: prompts, a prefix hit
and a long answer. Exit status 1 if an answer changed or nothing was released; 2, with a line that
says so, where torch_memory_saver is missing and nothing could be checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.lib.server import Server

FLAGS = ["--kv-cache-dtype", "int2", "--skip-tokenizer-init", "--max-running-requests", "8"]
FLAGS += ["--mem-fraction-static", "0.5", "--enable-memory-saver", "--enable-weights-cpu-backup"]
PROMPTS = [list(range(100, 1100)), list(range(100, 1100)) + [7] * 300, [5, 6, 7, 8] * 10]
# Of log-probabilities, in nats. Same requests in the same order on the same kernels: what differs
# is rounding where a reduction's order is not fixed. Lost rotations move them by more than 1.
TOLERANCE = 0.05


def answers(server: Server) -> list[list[tuple[float, int]]]:
    found = [server.generate(p, 64, return_logprob=True)["meta_info"] for p in PROMPTS]
    return [[(x[0], x[1]) for x in m["output_token_logprobs"]] for m in found]


def difference(a: list, b: list) -> float:
    """Largest difference of a token's log-probability, up to the first other token, which counts
    as infinite unless it was a near-tie."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        for (p, token), (q, other) in zip(x, y, strict=True):
            worst = max(worst, abs(p - q))
            if token != other:
                worst = worst if abs(p - q) < TOLERANCE / 10 else float("inf")
                break
    return worst


def used_mib() -> int:
    """GPU memory in use, all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def check(server: Server) -> list[str]:
    """What went wrong."""
    wrong, before, state = [], answers(server), server.state()
    pool_mib = state["bytes_total"] >> 20
    for tags in (["kv_cache"], ["kv_cache", "weights", "cuda_graph"]):
        held = used_mib()
        server.request("/release_memory_occupation", {"tags": tags})
        freed = held - used_mib()
        server.request("/resume_memory_occupation", {"tags": tags})
        worst = difference(before, answers(server))
        print(
            f"{' + '.join(tags)}: {freed} MiB released (the cache has {pool_mib}), "
            f"{used_mib()} of {held} in use after resume; answers differ by at most {worst:.4f} "
            f"nats (allowed {TOLERANCE})"
        )
        if freed < pool_mib / 2:
            wrong.append(f"{tags}: {freed} MiB released, less than half of the cache")
        if worst > TOLERANCE:
            wrong.append(f"{tags}: answers changed")
    if server.state()["sink_hits"] <= state["sink_hits"]:
        wrong.append("the sink cache was not used after the resume")
    return wrong


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=Path, required=True, help="model folder")
    p.add_argument("--log", type=Path, help="the server's log (default: a temporary file)")
    args = p.parse_args()
    if importlib.util.find_spec("torch_memory_saver") is None:
        print("NOT CHECKED: torch_memory_saver is not installed (pip install torch-memory-saver)")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "server.log"
        with Server(args.model, log, *FLAGS, timeout=400) as server:
            wrong = check(server)
    print(*(f"WRONG: {line}" for line in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
