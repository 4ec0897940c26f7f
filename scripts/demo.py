"""Serve a model with a 2-bit KV cache and chat with it over the OpenAI API.

    python -m scripts.demo --model DIR [--serve]

Two sessions share one long system prompt; each has three turns. Prints the answers, what came from
the prefix cache, and what the cache holds and costs. Exits non-zero if anything failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.lib.server import Server

console = Console(highlight=False, soft_wrap=True)

RULES = (
    "You are the assistant of a small mountain library. Answer in one or two short sentences. "
    "The library opens at nine and closes at six, except on Sundays, when it stays closed. "
    "Members may borrow five books for three weeks and renew them once. Children read for free. "
    "The reading room holds forty seats, two fireplaces and a map of every trail in the valley. "
    "Books on geology stand in hall two, poetry in hall three, and travel stories by the door. "
    "Lost books are replaced at cost. Dogs may wait in the porch, where there is always water. "
)
SYSTEM = RULES * 4
SESSIONS = {
    "hours": (
        "When do you open?",
        "And on Sundays?",
        "Thank you! May my dog come along?",
    ),
    "books": (
        "How many books may I borrow?",
        "For how long?",
        "Where do I find poetry?",
    ),
}


def chat(server: Server, model: str) -> tuple[int, list[int]]:
    """Run both sessions turn by turn; returns the tokens of the first prompt and the cached
    tokens of every answer."""
    histories = {name: [{"role": "system", "content": SYSTEM}] for name in SESSIONS}
    first_prompt, cached = 0, []
    for turn in range(3):
        for name, history in histories.items():
            history.append({"role": "user", "content": SESSIONS[name][turn]})
            answer = server.request(
                "/v1/chat/completions",
                {"model": model, "messages": history, "max_tokens": 40, "temperature": 0},
            )
            message = answer["choices"][0]["message"]["content"].strip()
            history.append({"role": "assistant", "content": message})
            usage = answer["usage"]
            first_prompt = first_prompt or usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            cached.append(details.get("cached_tokens", 0))
            console.print(f"[bold]{name}[/bold] > {SESSIONS[name][turn]}")
            console.print(f"    {message}")
            console.print(f"    [dim]prompt {usage['prompt_tokens']}, cached {cached[-1]}[/dim]")
    return first_prompt, cached


def report(state: dict) -> None:
    table = Table(title="2-bit KV cache", show_header=False)
    hits, misses = state["sink_hits"], state["sink_misses"]
    windows = f"{state['sink_tokens']} + {state['recent_tokens']}"
    for name, value in (
        ("codec, artifact", f"{state['codec']}, {state['artifact']}"),
        ("tokens held in 2 bits (history)", state["history_tokens"]),
        ("exact tokens of a running request (sink + recent)", windows),
        (
            "tokens demoted, prefix tokens read",
            f"{state['demoted_tokens']}, {state['materialised_tokens']}",
        ),
        ("sink rows restored exactly / from codes", f"{hits} / {misses}"),
        (
            "bytes per token",
            f"{state['bytes_per_token']} "
            f"(BF16: {state['bf16_bytes_per_token']}, "
            f"{state['bf16_bytes_per_token'] / state['bytes_per_token']:.2f}x)",
        ),
        ("bits per element of history", f"{state['bits_per_element']:.2f}"),
        (
            "bits per element, windows included",
            ", ".join(
                f"{bits:.2f} at {int(n) // 1024}k" for n, bits in state["effective_bits"].items()
            ),
        ),
    ):
        table.add_row(name, str(value))
    for part, size in state["bytes"].items():
        table.add_row(f"allocated: {part}", f"{size / 2**20:.1f} MB")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--serve", action="store_true", help="leave the server running")
    parser.add_argument("--log", type=Path, default=Path(".cache/demo-server.log"))
    args = parser.parse_args()
    flags = ["--kv-cache-dtype", "int2", "--max-running-requests", "8"]
    flags += ["--max-total-tokens", "16384", "--enable-cache-report"]
    console.print(f"starting the server (log: {args.log}); the first start calibrates the model")
    with Server(args.model, args.log, *flags, timeout=1200) as server:
        prompt_tokens, cached = chat(server, args.model.name)
        state = server.state()
        report(state)
        again = state["recent_tokens"] if state["prefix_window"] == "recompute" else 0
        if min(cached[1:]) < prompt_tokens - again - 32:  # questions differ by a few tokens
            sys.exit(f"the shared system prompt was not reused: cached tokens {cached}")
        if state["sink_misses"] or not state["sink_hits"]:
            sys.exit(f"sink rows were not restored from the sink cache: {state}")
        if args.serve:
            console.print(f"serving at http://127.0.0.1:{server.port}/v1 (Ctrl-C stops it)")
            try:
                server.process.wait()
            except KeyboardInterrupt:
                pass
    console.print("demo passed")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
