"""``oscar-sglang doctor`` and the kill switch: every failure is named, none becomes BF16."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from oscar_sglang import hooks
from oscar_sglang.artifact import file as art
from oscar_sglang.cli import main
from oscar_sglang.config import disabled
from oscar_sglang.health import doctor, selftest
from oscar_sglang.plugin import registration
from oscar_sglang.plugin.model_folder import NamedModel
from scripts.lib.tiny_models import edit_config, llama

pytestmark = pytest.mark.sglang


@pytest.fixture
def model(tmp_path):
    return llama(tmp_path / "model")


def failures(*args) -> dict[str, str]:
    return {c.name: c.detail for c in doctor.examine(*args) if c.status == doctor.FAIL}


def test_a_good_machine_and_model(model, tmp_path, capsys):
    file = tmp_path / "a.safetensors"
    art.data_free(art.Fingerprint.of(model), "feedback").save(file)
    assert main(["doctor", "--model", str(model), "--artifact", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # a narrow table breaks its lines
    for part in (
        "sglang",
        "hook ServerArgs.resolve_once",
        "kernels",
        "fits the model",
        "ready for int2",
    ):
        assert part in printed


def test_kernels_that_disagree_or_do_not_compile(monkeypatch, capsys):
    def compare(device, triton_only):
        if triton_only:
            raise RuntimeError("no such architecture\nat line 7")
        return selftest.Agreement(0.5, 0.0, 0.0)

    monkeypatch.setattr(selftest, "compare", compare)
    cuda, triton = doctor.kernels(("CUDA", "Triton"))
    assert cuda.status == triton.status == doctor.FAIL
    assert "50.00% of rows" in cuda.detail and "at least 97%" in cuda.detail
    assert triton.detail.endswith("RuntimeError: no such architecture")
    monkeypatch.setattr(doctor, "device", lambda: iter([cuda]))
    assert main(["doctor"]) == 1
    assert "CUDA kernels" in capsys.readouterr().out
    good = selftest.Agreement(0.999, 1e-3, 1e-3)
    monkeypatch.setattr(selftest, "compare", lambda *_args, **_kwargs: good)
    assert [c.status for c in doctor.kernels(("CUDA",))] == [doctor.OK]


def test_what_does_not_fit_is_named(model, tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.safetensors"
    art.data_free(art.Fingerprint.of(model), "feedback").save(file)
    edit_config(model, num_key_value_heads=4, head_dim=72)
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    found = failures(NamedModel(str(model)), file)
    assert "head_dim 72" in found["model LlamaForCausalLM"]
    assert "POST_CAPTURE" in found["environment"] and found["artifact"]
    assert main(["doctor", "--artifact", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().out


def test_a_changed_sglang_is_named(monkeypatch):
    hook = hooks.HOOKS[0]
    monkeypatch.setattr(hooks, "HOOKS", (replace(hook, takes=("everything",)), *hooks.HOOKS[1:]))
    monkeypatch.setattr(hooks, "SGLANG_VERSION", "0.5.99")
    registration.unfit.cache_clear()
    found = failures()
    registration.unfit.cache_clear()
    assert "pip install sglang==0.5.99" in found["sglang"]
    assert "takes (parser), expected (everything)" in found["hook ServerArgs.add_cli_args"]


@pytest.mark.parametrize("value, off", [("1", True), ("yes", True), ("0", False), ("", False)])
def test_kill_switch_values(monkeypatch, value, off):
    monkeypatch.setenv("OSCAR_SGLANG_DISABLE", value)
    assert disabled() is off


def test_kill_switch_registers_nothing_and_says_so(monkeypatch, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry

    def never(*_):
        raise AssertionError("registered although switched off")

    monkeypatch.setenv("OSCAR_SGLANG_DISABLE", "1")
    monkeypatch.setattr(HookRegistry, "register", never)
    registration.register()
    assert "switched off by OSCAR_SGLANG_DISABLE" in caplog.text
    assert "OSCAR_SGLANG_DISABLE" in doctor.kill_switch().detail


def test_a_switched_off_plugin_means_no_server_rather_than_bf16(model):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "oscar_sglang.launch_server", "--model-path", str(model)),
            *("--device", "cpu", "--kv-cache-dtype", "int2"),
        ],
        env={**os.environ, "OSCAR_SGLANG_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode not in (0, None)
    assert "invalid choice: 'int2'" in done.stderr
    assert "Load weight" not in done.stdout + done.stderr
