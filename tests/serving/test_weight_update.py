"""New weights in a running server: the calibration follows them as soon as it can."""

from __future__ import annotations

import base64
import os
import urllib.error
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.lib import tiny_models
from tests.support.server import Server

pytestmark = pytest.mark.sglang

EMULATION = Path(__file__).parents[1] / "memory_saver"
FLAGS = ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--kv-cache-dtype"]
FLAGS += ["int2", "--max-total-tokens", "1500", "--max-running-requests", "2", "--enable-metrics"]
FLAGS += ["--oscar-sink-tokens", "4", "--oscar-recent-tokens", "16", "--oscar-debug-tags"]
FLAGS += ["--load-format", "dummy", "--enable-memory-saver"]
PROMPT = list(range(1, 200))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model") / "A")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Random weights at first; the memory saver is the tests' own."""
    path = os.pathsep.join(filter(None, [str(EMULATION), os.environ.get("PYTHONPATH")]))
    log = tmp_path_factory.mktemp("update") / "log"
    with Server(model, log, *FLAGS, env={"PYTHONPATH": path}) as s:
        yield s


def calibration(server: Server) -> dict:
    state = server.state()
    names = ("calibration", "weight_updates", "recalibrations")
    return {n: state[n] for n in (*names, "calibration_stale", "calibration_waits_for")}


def stale(server: Server) -> float:
    """As /metrics has it."""
    lines = server.request("/metrics").splitlines()
    return float(next(x for x in lines if x.startswith("oscar:calibration_stale")).split()[-1])


def update(server: Server, model: Path, **options) -> str:
    body = {"model_path": str(model), "load_format": "auto", **options}
    answer = server.request("/update_weights_from_disk", body)
    assert answer["success"]
    return answer["message"]


def test_dummy_weights_then_real_ones(server, model):
    assert calibration(server)["calibration"] == "data-free"
    server.generate(PROMPT, 4)
    first = server.state()["artifact"]
    assert "int2 was recalibrated in" in update(server, model)
    state = server.state()
    assert state["artifact"] != first and state["history_tokens"] == 0
    assert calibration(server) == {
        "calibration": "recalibrated",
        "weight_updates": 1,
        "recalibrations": 1,
        "calibration_stale": 0,
        "calibration_waits_for": "",
    }
    assert stale(server) == 0
    # Nothing was cached, and the tokens that it ran are counted nowhere.
    before = server.state()["demoted_tokens"]
    assert server.generate(PROMPT, 1)["meta_info"]["cached_tokens"] == 0
    assert server.state()["demoted_tokens"] - before <= len(PROMPT) + 1


def test_an_update_that_keeps_the_cache_waits_for_a_flush(server, model):
    """Codes of the old rotations would mean nothing under new ones."""
    answer = server.generate(PROMPT + [7] * 40, 4, return_logprob=True)
    assert "it waits for /flush_cache" in update(server, model, flush_cache=False)
    assert calibration(server)["calibration_stale"] == 1 and stale(server) == 1
    assert "STALE CALIBRATION" in server.log.read_text(errors="replace")
    answer = answer["meta_info"]["output_token_logprobs"]
    again = server.generate(PROMPT + [7] * 40, 4, return_logprob=True)["meta_info"]
    assert again["cached_tokens"] > 0  # the same weights, and the codes are still understood
    for a, b in zip(answer, again["output_token_logprobs"], strict=True):
        assert abs(a[0] - b[0]) < 0.1
    server.flush()
    state = calibration(server)
    assert (state["calibration_stale"], state["recalibrations"]) == (0, 2)


def test_weights_in_parts(server, model):
    """The calibration is measured once, when the update ends."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")
    weights = load_file(model / "model.safetensors")
    names = [n for n in weights if "k_proj" in n]
    server.flush()
    with pytest.raises(urllib.error.HTTPError):  # SGLang wants a session; nothing has changed
        send(server, MultiprocessingSerializer, {n: weights[n] for n in names})
    assert calibration(server)["calibration_stale"] == 0
    server.request("/begin_weight_update", {})
    for name in names:
        # Heads exchanged.
        swapped = weights[name].unflatten(0, (2, -1)).flip(0).flatten(0, 1).contiguous()
        send(server, MultiprocessingSerializer, {name: swapped})
    state = calibration(server)
    assert state["calibration_stale"] == 1 and state["recalibrations"] == 2
    first = server.state()["artifact"]
    assert "int2 was recalibrated" in server.request("/end_weight_update", {})["message"]
    state = calibration(server)
    assert (state["calibration_stale"], state["weight_updates"]) == (0, 3)
    assert state["recalibrations"] == 3 and server.state()["artifact"] != first


def send(server: Server, serializer, tensors: dict[str, torch.Tensor]) -> None:
    data = base64.b64encode(serializer.serialize(list(tensors.items()))).decode()
    server.request("/update_weights_from_tensor", {"serialized_named_tensors": [data]})


def test_an_update_while_the_cache_is_released_waits_for_it(server, model):
    """As RL does: memory is taken, weights are written, memory is given back."""
    server.request("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert "it waits for /resume_memory_occupation" in update(server, model)
    server.request("/resume_memory_occupation", {"tags": ["kv_cache"]})
    state = calibration(server)
    assert (state["calibration_stale"], state["recalibrations"]) == (0, 4)
    found = [server.generate(PROMPT, 8, return_logprob=True)["meta_info"] for _ in range(2)]
    assert found[1]["cached_tokens"] > 0
    assert all(abs(x[0]) < 20 for m in found for x in m["output_token_logprobs"])
