"""Statistics taken inside SGLang equal those taken with transformers. Each side runs in a process
of its own: SGLang's stand-ins must be on the path before transformers is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib import tiny_models
from tests.support import forks
from tests.support.runner import result_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    target = Path(os.environ.get("OSCAR_DEMO_MODEL", ROOT / ".cache" / "smollm2-135m"))
    subprocess.run([sys.executable, "-m", "scripts.demo_model", target], cwd=ROOT, check=True)
    return target


def compare(*arguments) -> None:
    assert result_of("statistics_parity", *arguments)["compared"] > 1000


def calibrate(folder: Path, model: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output of the command, which writes ``folder / "a.safetensors"``."""
    argv = ["calibrate", "--model", model, "--out", folder / "a.safetensors", "--tokens", "600"]
    log = folder / "log"
    code = forks.start("oscar_sglang.cli", [*argv, *flags], os.environ, log).wait()
    return code, log.read_text()


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
    for engine, problem in (("sglang", "cannot share 2 KV heads"), ("transformers", "--engine")):
        code, said = calibrate(tmp_path, model, "--tp", "3", "--engine", engine)
        assert code != 0 and problem in said


@pytest.mark.sglang
def test_calibrating_with_sglang_from_the_command_line(smollm2, tmp_path):
    code, said = calibrate(tmp_path, smollm2, "--engine", "sglang")
    assert code == 0, said[-2000:]
    assert (tmp_path / "a.safetensors").exists() and "peak memory" in said
