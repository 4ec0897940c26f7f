"""Simulate agent sessions against a running server and compare each with itself run alone.

    python scripts/agent_sim.py --port 30000 --sessions 30 --turns 20 --concurrency 8 --out r.json

The server must be on this machine and idle; its prefix cache is flushed. Give it a small
``--max-total-tokens`` for eviction and retraction, and ``--vocab`` its vocabulary. Exit status 1 if
a session differs by more than a tie or drift (see ``lib/agents.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lib"))

from agents import Workload, simulate  # noqa: E402
from server import Client  # noqa: E402


def parse() -> argparse.Namespace:
    d = Workload()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--port", type=int, default=30000)
    p.add_argument("--concurrency", type=int, default=8)
    for name in ("sessions", "turns", "systems", "system_tokens", "vocab", "top", "seed"):
        p.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(d, name))
    for name in ("turn_tokens", "answer_tokens"):
        p.add_argument("--" + name.replace("_", "-"), type=int, nargs=2, default=getattr(d, name))
    p.add_argument("--hangups", type=float, default=d.hangups, help="share of abandoned requests")
    p.add_argument("--out", type=Path, help="write the report as JSON")
    return p.parse_args()


def main() -> int:
    args = vars(parse())
    port, concurrency, out = (args.pop(k) for k in ("port", "concurrency", "out"))
    args |= {k: tuple(args[k]) for k in ("turn_tokens", "answer_tokens")}
    result = simulate(Client(port), Workload(**args), concurrency, lambda s: print(s, flush=True))
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    hidden = ("workload", "differences")
    print(json.dumps({k: v for k, v in result.items() if k not in hidden}, indent=1))
    return int(result["corrupt"] > 0)


if __name__ == "__main__":
    sys.exit(main())
