"""SGLang's own ``bench_serving --dataset-name generated-shared-prefix``, against a server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.lib.server import Client

# Its command line, in a process where what it imports for other workloads may be absent.
PROGRAM = "from scripts.lib import traffic; traffic.sglang_client().cli_main()"
ROOT = Path(__file__).parents[2]  # where that can be imported


@dataclass(frozen=True)
class Groups:
    """Prompts that share a long beginning within their group; popular groups are asked more."""

    groups: int = 48
    prompts: int = 8  # of a group, on average
    shared: int = 16_384  # tokens
    question: int = 128
    new_tokens: int = 64
    zipf: float = 0.8
    concurrency: int = 32
    seed: int = 7


def run(client: Client, model: Path, asked: Groups, seconds: float) -> dict[str, Any]:
    """The benchmark's own figures on an empty cache; raises where a request failed."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.jsonl"
        command = [
            *(sys.executable, "-c", PROGRAM),
            *("--backend", "sglang", "--base-url", f"http://127.0.0.1:{client.port}"),
            *("--model", str(model), "--dataset-name", "generated-shared-prefix"),
            *("--gsp-num-groups", str(asked.groups)),
            *("--gsp-prompts-per-group", str(asked.prompts)),
            *("--gsp-system-prompt-len", str(asked.shared)),
            *("--gsp-question-len", str(asked.question)),
            *("--gsp-output-len", str(asked.new_tokens), "--gsp-range-ratio", "1.0"),
            *("--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", str(asked.zipf)),
            *("--max-concurrency", str(asked.concurrency), "--seed", str(asked.seed)),
            *("--flush-cache", "--cache-report", "--disable-tqdm", "--output-file", str(target)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
        if done.returncode or not target.exists():
            raise RuntimeError(f"SGLang's benchmark:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        found = json.loads(target.read_text().splitlines()[-1])
    if found["completed"] != asked.groups * asked.prompts:
        raise RuntimeError(f"{found['completed']} of {asked.groups * asked.prompts} were answered")
    return {
        "requests": found["completed"],
        "seconds": round(found["duration"], 2),
        "requests_per_s": round(found["request_throughput"], 4),
        "output_tokens_per_s": round(found["output_throughput"], 2),
        "cache_hit_rate": round(found["cache_report"]["cache_hit_rate_pct"] / 100, 4),
        "ttft_p50_s": round(found["median_ttft_ms"] / 1e3, 4),
        "ttft_p95_s": round(found["p95_ttft_ms"] / 1e3, 4),
        "tpot_p50_ms": round(found["median_tpot_ms"], 3),
        "tpot_p95_ms": round(found["p95_tpot_ms"], 3),
        "conditions": asdict(asked),
    }
