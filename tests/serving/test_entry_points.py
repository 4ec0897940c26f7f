"""int2 through every way SGLang is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_sglang.launch_server import cpu_environment, has_gpu
from scripts.lib.server import Server

pytestmark = pytest.mark.sglang

ENGINE = """
import sglang, sys
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", kv_cache_dtype="int2",
        oscar_sink_tokens=8, oscar_recent_tokens=16, load_format="dummy", max_total_tokens=512,
        skip_tokenizer_init=True, max_running_requests=2, disable_cuda_graph=True,
        log_level="info",
    )
    out = engine.generate(
        input_ids=list(range(1, 60)),
        sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    )
    print("ANSWER", len(out["output_ids"]), flush=True)
    engine.shutdown()
"""


def environment() -> dict[str, str]:
    added = {} if has_gpu() else cpu_environment(dict(os.environ))
    return {**os.environ, **added, "HF_HUB_OFFLINE": "1"}


def test_engine(tiny_llama, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, script, tiny_llama],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "ANSWER 4" in done.stdout, done.stderr[-3000:]
    assert "oscar: 512 tokens held" in done.stdout + done.stderr


STOCK = {
    "launch_server": [sys.executable, "-m", "sglang.launch_server"],
    "serve": [str(Path(sys.executable).parent / "sglang"), "serve"],
}


@pytest.mark.parametrize("launcher", STOCK)
def test_stock_launchers(tiny_llama, tmp_path, launcher):
    flags = ["--kv-cache-dtype", "int2", "--device", "cpu", "--dtype", "float32"]
    flags += ["--max-total-tokens", "512", "--max-running-requests", "2", "--load-format", "dummy"]
    flags += ["--skip-tokenizer-init"]
    server = Server(tiny_llama, tmp_path / "log", *flags, env=environment())
    assert server.command[:3] == [sys.executable, "-m", "oscar_sglang.launch_server"]
    server.command[:3] = STOCK[launcher]
    with server:
        assert len(server.generate(list(range(1, 60)), 4)["output_ids"]) == 4
        assert server.state()["codec"] == "feedback"
