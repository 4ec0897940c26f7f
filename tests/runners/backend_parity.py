"""Run by test_gpu_backend.py in a process of its own: the GPU backend against the reference.

    python -m tests.runners.backend_parity MODEL CODEC EVERY

Without a GPU the GPU backend's Triton kernels are interpreted ($TRITON_INTERPRET=1) and
FlashAttention is replaced by the reference. Its debug tags check every EVERY-th step. Prints one
JSON object: relative differences of logits, sink-cache counters, (splits, requests) of each plan,
what the tags have seen and what they say to faults. With a GPU only the last two, of the backend as
it is served there.
"""

from __future__ import annotations

import json
import sys

import torch

from oscar_sglang.launch_server import has_gpu
from oscar_sglang.watch.debug_tags import watch_steps
from oscar_sglang.watch.places import OwnershipError
from scripts.lib.inprocess import Runner

# Lengths of the scenario: two prompts, the end of the first one's second chunk, prefix hits. With
# blocks the first chunk ends inside one, and decoding fills up another (the second prompt's).
TOKENS = dict(first=70, second=9, end=120, hit=90, steps=4, short=3, cut=5)
BLOCKS = dict(first=100, second=124, end=200, hit=128, steps=2, short=128, cut=1)


def scenario(runner: Runner, base: int, n: dict[str, int]) -> list[torch.Tensor]:
    """Prompts, chunks, a prefix hit, a mixed batch and decode steps on rows base, base + 1, ..."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (6, 400), generator=g).tolist()
    a, b = runner.request(base), runner.request(base + 1)
    out = [runner.extend((a, ids[0][: n["first"]]), (b, ids[1][: n["second"]]))]
    out.append(runner.extend((a, ids[0][n["first"] : n["end"]])))  # a second chunk
    hit = runner.request(base + 2, a, n["hit"])
    out.append(runner.extend((hit, ids[2][:7]), (b, ids[1][200:203])))
    for step in range(n["steps"]):
        out.append(runner.decode((a, ids[3][step]), (b, ids[4][step]), (hit, ids[5][step])))
    short = runner.request(base + 3, b, n["short"])
    # A session's next turn: its row goes on earlier than it was written to.
    del a.tokens[-n["cut"] :], a.slots[-n["cut"] :]
    out.append(runner.extend((short, ids[2][20:24]), (a, ids[5][20:29])))
    return out


def several_splits() -> list[tuple[int, int]]:
    """More splits than a CPU would be given, of as little work as a split may have. Returns the
    (splits, requests) of every step that is planned, a list that grows."""
    from oscar_sglang.kernels import attend, decode, plan

    seen, original = [], decode.plan_attend

    def planned(*args, **kwargs):
        made = original(*args, min_units=plan.WINDOW_COST.value, **kwargs)
        seen.append((int(made[1]), int(made[2])))
        return made

    decode.plan_attend = planned
    attend.choose_splits = lambda *_: 12
    return seen


def move_ring(runner: Runner) -> None:
    """What the kernels take for the ring is one row off; the store itself is not."""
    view = runner.runner.attn_backend.views[0]
    moved = view._replace(ring_k=view.ring_k.roll(1, 1))
    runner.runner.attn_backend.views[0] = moved


def faults(runner: Runner) -> dict[str, str]:
    """Name of a fault -> what stopped the step that would have followed, and did not begin."""
    runner.pool.watch.every = 1
    ids = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    backend, windows, said = runner.runner.attn_backend, runner.segments.windows, {}
    request = runner.request(1)
    runner.extend((request, ids[:60]))
    runner.decode((request, ids[60]))  # records what the prompt has written
    for name, damage, step in (
        ("attend reads elsewhere", move_ring, "decode"),
        ("materialise reads elsewhere", move_ring, "extend"),
        ("ring begins elsewhere", lambda *_: windows.recent_start[1].add_(50), "extend"),
        ("ring row overwritten", lambda *_: windows.recent_v[0][1].zero_(), "decode"),
    ):
        sound = list(backend.views), windows.recent_start.clone()
        damage(runner)
        try:
            getattr(runner, step)((request, ids[61] if step == "decode" else ids[61:]))
            said[name] = "nothing"
        except OwnershipError as error:
            said[name] = str(error)
        backend.views[:], windows.recent_start[:] = sound
        del request.tokens[61:], request.slots[61:]
    return said


def served(model: str, codec: str, **options) -> Runner:
    sizes = dict(rows=9, max_total_tokens=4096)
    return Runner(model, "auto", oscar_codec=codec, skip_tokenizer_init=True, **sizes, **options)


def on_gpu(model: str, codec: str, every: str) -> None:
    runner = served(
        model,
        codec,
        oscar_sink_tokens=16,
        oscar_recent_tokens=48,
        oscar_debug_tags=True,
        oscar_debug_tags_every=int(every),
    )
    runner.pool.watch.ready()
    scenario(runner, 1, BLOCKS)
    print(json.dumps({"tags": runner.pool.stats()["debug_tags"], "faults": faults(runner)}))


def main(model: str, codec: str, every: str) -> None:
    runner = served(
        model,
        codec,
        oscar_sink_tokens=6,
        oscar_recent_tokens=20,
        oscar_scratch_tokens=90 if codec == "omni" else 33,
    )
    block = runner.pool.segments.spec.block
    lengths = BLOCKS if block > 1 else TOKENS
    expected = scenario(runner, 1, lengths)
    reference_counts = runner.pool.device_counters.clone()

    splits = several_splits()
    from oscar_sglang.kernels.decode import DecodeAttention
    from oscar_sglang.pool.gpu_backend import OscarGpuBackend

    plan = runner.pool.setup.plan
    runner.pool.decode_attention = DecodeAttention(
        heads=4,
        kv_heads=plan.history.kv_heads,
        head_dim=plan.history.head_dim,
        dtype=torch.float32,
        windows=plan.windows,
        page_size=runner.page,
        max_batch=8,
        device="cpu",
        block=block,
    )
    backend = OscarGpuBackend(runner.runner)
    runner.runner.attn_backend = backend
    watch_steps(backend, int(every))
    runner.pool.watch.ready()
    got = scenario(runner, 5, lengths)
    tags = runner.pool.stats()["debug_tags"]
    differences = [((x - y).norm() / y.norm()).item() for x, y in zip(got, expected, strict=True)]
    planned = list(splits)
    counts = (runner.pool.device_counters - reference_counts).tolist()
    result = {"differences": differences, "counts": [reference_counts.tolist(), counts]}
    result |= {
        "splits": planned,
        "tags": tags,
        "faults": faults(runner) if codec == "feedback" else {},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    (on_gpu if has_gpu() else main)(*sys.argv[1:])
