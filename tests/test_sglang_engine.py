"""Statistics taken inside SGLang equal those taken with transformers. Each side runs in a process
of its own: SGLang's stand-ins must be on the path before transformers is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib import tiny_models

ROOT = Path(__file__).parents[1]
_COMPARE = """
import sys
from oscar_sglang.launch_server import enter_cpu_mode
enter_cpu_mode()
import torch
torch.set_num_threads(1)
from pathlib import Path
from oscar_sglang.calibration.collect import collect, load_model, score
from oscar_sglang.calibration.data import load_tokens
from oscar_sglang.calibration.fit import fit_layer
from oscar_sglang.calibration.model_fit import Fitter
from oscar_sglang.calibration.widths import probe_ids
from oscar_sglang.kernels.codec import CODECS, rotate
from oscar_sglang.calibration.sglang_engine import collect_in_sglang

if "qwen3.5" in sys.argv[1]:
    from tests.support import gated_delta_net
    gated_delta_net.install()
model, tokens = Path(sys.argv[1]), load_tokens(sys.argv[2], Path(sys.argv[1]), 3000)
fit = Fitter("position", 4096, 64)
inside, names, scores = collect_in_sglang(model, tokens.sequences, tp=int(sys.argv[3]), fit=fit)
loaded = load_model(model, "cpu")
outside = collect(loaded, tokens.sequences)
expected = score(loaded, probe_ids(tokens.sequences, 64), fit(outside), 64)
gap = max(abs(a / b - 1) for x, y in zip(scores, expected, strict=True) for a, b in zip(x, y))
assert len(scores) == len(inside) and gap < 0.02, gap
assert len(inside) == len(outside) and any("qkv_proj" in n for n in names)
differ = total = 0
for a, b in zip(inside, outside, strict=True):
    assert a.count == b.count == sum(len(s) - 64 for s in tokens.sequences) - len(a.held_k)
    for field in ("k_mean", "ktk", "vtv", "qtq", "oto", "held_k", "held_v"):
        x, y = getattr(a, field), getattr(b, field)
        gap = float((x - y).norm() / y.norm())
        assert gap < 1e-3, (field, gap)
    assert a.before.rope == b.before.rope and any(a.before.rope.theta)
    assert (a.before.held_positions == b.before.held_positions).all()
    for field in ("k_mean", "ktk", "qtq"):
        x, y = getattr(a.before, field), getattr(b.before, field)
        gap = float((x - y).norm() / y.norm())
        assert gap < 1e-3, ("before", field, gap)
    spec = CODECS["feedback"]
    p, r = (fit_layer(m, "feedback").params for m in (a, b))
    for code, held, m, n in (
        (lambda q, y: spec.encode_k(q, y), b.held_k, p.r_k, r.r_k),
        (lambda q, y: spec.encode_v(q, y), b.held_v, p.r_v, r.r_v),
    ):
        one, two = code(p, rotate(held, m)).packed, code(r, rotate(held, n)).packed
        differ += int((one != two).sum())
        total += one.numel()
assert differ <= total // 10000, (differ, total)
print("same", total)
"""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    target = Path(os.environ.get("OSCAR_DEMO_MODEL", ROOT / ".cache" / "smollm2-135m"))
    subprocess.run([sys.executable, "-m", "scripts.demo_model", target], cwd=ROOT, check=True)
    return target


def compare(*arguments) -> None:
    code = [sys.executable, "-c", _COMPARE, *map(str, arguments)]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("same")


@pytest.mark.sglang
def test_statistics_inside_sglang_equal_those_of_transformers(smollm2):
    compare(smollm2, f"{ROOT / 'tests/data/smollm2_tokens.npz'}:cal_tech", 1)


@pytest.mark.sglang
def test_ranks_see_their_own_heads(tmp_path):
    """Two tensor-parallel ranks, one KV head each, put together."""
    compare(tiny_models.with_tokenizer(tiny_models.llama(tmp_path / "model")), "random", 2)


@pytest.mark.sglang
def test_a_hybrid_model_shows_its_attention_layers(tmp_path):
    model = tiny_models.family("qwen3.5", tmp_path / "qwen3.5")
    compare(tiny_models.with_tokenizer(model), "random", 1)


@pytest.mark.sglang
def test_ranks_must_divide_the_heads(tmp_path):
    model = tiny_models.llama(tmp_path / "model")
    command = [sys.executable, "-m", "oscar_sglang.cli", "calibrate", "--model", str(model)]
    command += ["--out", str(tmp_path / "a.safetensors"), "--tokens", "600", "--tp", "3"]
    for engine, problem in (("sglang", "cannot share 2 KV heads"), ("transformers", "--engine")):
        done = subprocess.run([*command, "--engine", engine], capture_output=True, text=True)
        assert done.returncode != 0 and problem in done.stderr + done.stdout


@pytest.mark.sglang
def test_calibrating_with_sglang_from_the_command_line(smollm2, tmp_path):
    out = tmp_path / "a.safetensors"
    command = [sys.executable, "-m", "oscar_sglang.cli", "calibrate", "--model", smollm2]
    command += ["--out", out, "--engine", "sglang", "--tokens", "600"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert out.exists() and "peak memory" in done.stdout
