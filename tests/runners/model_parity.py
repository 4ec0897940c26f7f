"""Run by serving/test_models.py in a process of its own: one import of SGLang, a fork per run.

    python -m tests.runners.model_parity FOLDER FAMILY...

Each family runs on SGLang's own cache, on int2 with windows that hold everything, and on int2 with
small ones. Prints a JSON object: family -> error, or relative differences of logits and the plan.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from oscar_sglang.calibration import Plan, calibrate
from scripts.lib import inprocess
from scripts.lib.tiny_models import HYBRID_FAMILIES, VOCAB, family
from scripts.lib.tiny_vision import WRAPPED
from tests.support import gated_delta_net, state_space

RUNS = {"stock": None, "wide": (256, 256), "narrow": (4, 12)}


def native_router() -> None:
    """SGLang routes experts with GPU kernels; its own PyTorch form of them runs anywhere."""
    from sglang.srt.layers.moe import topk

    topk.fused_topk = topk.fused_topk_torch_native
    topk.biased_grouped_topk = topk.biased_grouped_topk_impl


def scenario(runner: inprocess.Runner) -> torch.Tensor:
    """A prompt, a second chunk, a prefix hit in a mixed batch, decode steps, a row that is handed
    to another: logits [n, vocab]."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (4, 120), generator=g).tolist()
    a, b = runner.request(1), runner.request(2)
    out = [runner.extend((a, ids[0][:60]), (b, ids[1][:5])), runner.extend((a, ids[0][60:90]))]
    # Linear layers go on only from where their state is kept, which here is the end.
    hit = runner.request(3, a, 90 if runner.is_hybrid else 70)
    out.append(runner.extend((hit, ids[2][:9]), (b, ids[1][5:6])))
    for step in range(4):
        out.append(runner.decode((a, ids[3][step]), (b, ids[3][step + 10]), (hit, ids[2][step])))
    # b is retracted: its row goes to a prompt of all its tokens, in other slots.
    again = runner.request(2)
    out.append(runner.extend((again, b.tokens), (hit, ids[2][9:12])))
    out.append(runner.decode((again, ids[3][20]), (hit, ids[3][21])))
    return torch.cat(out)


def artifact_of(folder: Path) -> Path:
    """Beside the folder: SGLang takes every .safetensors in it for weights."""
    return folder.with_suffix(".artifact")


def run(folder: Path, windows: tuple[int, int] | None) -> dict:
    flags, artifact = {}, None
    if windows:
        artifact = artifact_of(folder)
        flags = dict(oscar_sink_tokens=windows[0], oscar_recent_tokens=windows[1])
    if folder.name in HYBRID_FAMILIES:
        flags["disable_radix_cache"] = True  # with it SGLang wants a GPU for hybrid models
    runner = inprocess.Runner(
        folder, artifact, skip_tokenizer_init=True, max_total_tokens=1024, rows=5, **flags
    )
    result = {"logits": scenario(runner).tolist()}
    if windows:
        stats, layers = runner.pool.stats(), runner.pool.layer_num
        result |= {"layers": layers, "heads": runner.pool.head_num, "dim": runner.pool.head_dim}
        result |= {k: stats[k] for k in ("bytes", "planned_bytes", "bits_per_element")}
    return result


def forked(function, *args) -> dict:
    """The result of a child process; its errors as {"error": traceback}."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(2, 1)  # what SGLang prints
        try:
            result = function(*args)
        except BaseException:
            result = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        text = source.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"error": "the child died"}')


def compare(folder: Path) -> dict:
    # As a first start does, but for fewer tokens.
    calibrate(Plan(folder, tokens=512)).save(artifact_of(folder))
    found = {name: forked(run, folder, windows) for name, windows in RUNS.items()}
    if errors := [f"{name}: {r['error']}" for name, r in found.items() if "error" in r]:
        return {"error": "\n".join(errors)}
    logits = {name: torch.tensor(r.pop("logits")) for name, r in found.items()}
    stock = logits["stock"]
    differences = {
        name: ((logits[name] - stock).norm(dim=-1) / stock.norm(dim=-1)).tolist()
        for name in ("wide", "narrow")
    }
    return {**differences, "pool": found["narrow"], "scale": stock.std(-1).tolist()}


def made(name: str, folder: Path) -> Path:
    return WRAPPED[name][0](folder) if name in WRAPPED else family(name, folder)


def main(folder: Path, names: list[str]) -> None:
    import sglang.benchmark.one_batch  # noqa: F401  (the expensive import)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    native_router()
    gated_delta_net.install()
    state_space.install()
    print(json.dumps({name: compare(made(name, folder / name)) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
