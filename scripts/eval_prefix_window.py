"""What ``--oscar-prefix-window`` is worth: KL after a prefix hit when the recent window of the
cached prefix is read as codes (reuse), computed again (recompute) or taken over from the request
that left it (park), and what that costs.

    python -m scripts.eval_prefix_window --model DIR --artifact FILE --tokens NPZ [--json OUT]

A document's first ``--context`` tokens are cached; a turn of 16 (or more) tokens follows, then
``--rows`` decode steps on the document's own tokens. Decoding starts at the same position in every
mode. "match" recomputes the last ``recent`` tokens of the match whatever the turn's length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

SINK, RECENT = 64, 256
MODES = ("reuse", "park", "recompute", "match")


def cached(mode: str, match: int, length: int) -> int:
    """Tokens taken from the prefix cache: ``match`` of ``length`` are there."""
    return {
        "reuse": match,
        "park": match,
        "recompute": min(match, length - RECENT),
        "match": match - RECENT,
    }[mode]


def measure(args: argparse.Namespace, documents: dict[str, list[int]]) -> list[dict]:
    from transformers import AutoModelForCausalLM

    from scripts.lib.inprocess import Runner
    from scripts.lib.pool_quality import exact_logprobs

    size = args.context + max(args.turns) + args.rows
    documents = {name: ids[:size] for name, ids in documents.items()}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
    rows = max(args.turns) + args.rows
    exact = {name: exact_logprobs(model, ids, rows) for name, ids in documents.items()}
    del model
    need = size * (1 + len(MODES) * len(args.turns)) * len(documents) + 64
    runner = Runner(
        args.model, args.artifact, max_total_tokens=need, rows=3, oscar_prefix_window="park"
    )
    source, low = runner.pool.parking.source, runner.pool.parking.low
    results = []
    for name, ids in documents.items():
        first = runner.request(1)
        runner.extend((first, ids[: args.context]))
        for turn in args.turns:
            for mode in MODES:
                length = args.context + turn
                start = cached(mode, args.context, length)
                # As after a request whose last step SGLang had launched when it ended.
                source[2], low[2] = first.row * (mode == "park"), args.context + 1 - RECENT
                request = runner.request(2, first, start)
                began = time.perf_counter()
                steps = [runner.extend((request, ids[start:length]))]
                seconds = time.perf_counter() - began
                steps += [runner.decode((request, t)) for t in ids[length : length + args.rows - 1]]
                got = torch.cat(steps).log_softmax(-1)
                want = exact[name][len(exact[name]) - len(ids) + length - 1 :][: len(got)]
                kl = (want.exp() * (want - got)).sum(-1)
                top1 = (want.argmax(-1) == got.argmax(-1)).float().mean().item()
                results.append(
                    dict(
                        document=name,
                        turn=turn,
                        mode=mode,
                        prefilled=length - start,
                        seconds=seconds,
                        kl=kl.mean().item(),
                        kl_first=kl[0].item(),
                        top1=top1,
                    )
                )
    return results


def main() -> None:
    from scripts.eval_pool import load_documents

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--documents", help="comma-separated test_* keys (default: all)")
    parser.add_argument("--context", type=int, default=1600, help="cached tokens")
    parser.add_argument("--turns", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rows", type=int, default=64, help="positions compared")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.documents.split(",") if args.documents else None
    found = measure(args, load_documents(args.tokens, names, 1 << 30))
    for turn in args.turns:
        for mode in MODES:
            mine = [r for r in found if (r["turn"], r["mode"]) == (turn, mode)]
            mean = {k: statistics.mean(r[k] for r in mine) for k in ("kl", "kl_first", "top1")}
            print(
                f"turn {turn:4}  {mode:9}  prefilled {mine[0]['prefilled']:4}  KL {mean['kl']:.4f}"
                f"  KL of the first token {mean['kl_first']:.4f}  top-1 {mean['top1']:.1%}"
                f"  {statistics.mean(r['seconds'] for r in mine):.2f} s"
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
