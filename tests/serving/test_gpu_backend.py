"""The GPU backend's own code on a CPU: Triton under the interpreter, a two-layer model; on a GPU
its debug tags. And when a server checks its kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oscar_sglang.health import selftest
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.launch_server import has_gpu
from scripts.lib import tiny_models
from tests.support.runner import result_of

pytestmark = pytest.mark.sglang


SAID = {
    "attend reads elsewhere": "the attend kernel is",
    "materialise reads elsewhere": "the materialise kernel gives another K row",
    "ring row overwritten": "holds other bytes than were written for it",
    "ring begins elsewhere": "its ring begins at position 50, expected 0",
}


def run(model: Path, codec: str, every: int) -> dict:
    interpreted = {} if has_gpu() else {"TRITON_INTERPRET": "1"}
    return result_of("backend_parity", model, codec, every, **interpreted)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU")
def test_debug_tags_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    result = run(tiny_models.qwen3(tmp_path / "model"), "feedback", 1)
    tags = result["tags"]
    # backend_parity.scenario: four extends, BLOCKS["steps"] decodes.
    assert tags["steps"] == tags["checked_steps"] == 6 and tags["checked_tokens"] > 1000
    for fault, words in SAID.items():
        assert words in result["faults"][fault], result["faults"]


@pytest.mark.skipif(has_gpu(), reason="interprets kernels on a CPU")
@pytest.mark.parametrize(
    "codec, make, every",
    [
        ("feedback", tiny_models.qwen3, 2),
        ("compact", partial(tiny_models.family, "phi3"), 4),
        ("omni", tiny_models.llama, 2),
    ],
)
def test_gpu_backend_equals_the_reference_backend(tmp_path, monkeypatch, codec, make, every):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    result = run(make(tmp_path / "model"), codec, every)
    # Both store the same codes; logits differ by float32 rounding and FP16 operands of attend.
    assert max(result["differences"]) < 2e-3, result["differences"]
    reference, gpu = result["counts"]
    assert reference == gpu and reference[0] > 0 and reference[2] == 2
    # Requests of a few hundred tokens, and yet in several splits each.
    assert result["splits"] and all(n >= 2 * requests for n, requests in result["splits"])
    tags = result["tags"]
    assert tags["steps"] == every * tags["checked_steps"] == len(result["differences"])
    assert tags["checked_tokens"] * every > 1000 and tags["probed_requests"] * every > 12
    for fault, words in SAID.items() if result["faults"] else ():
        assert words in result["faults"][fault], result["faults"]
    assert bool(result["faults"]) == (codec == "feedback")


@pytest.mark.parametrize(
    "capability, codec, checks",
    [
        *(((8, 0), "feedback", 1), ((9, 0), "feedback", 0), ((12, 0), "lloyd", 1)),
        *(((9, 0), "omni", 0), ((9, 0), "position", 1)),
    ],
)
def test_a_server_checks_kernels_that_are_not_proven(monkeypatch, capability, codec, checks):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    checked = []
    monkeypatch.setattr(selftest, "check_served", lambda *what: checked.append(what))
    views = [SimpleNamespace(spec=CODECS[codec], params="of layer 0")]
    for cuda in (True, False):  # the portable kernels are none of those
        attention = SimpleNamespace(cuda=cuda, device=torch.device("cuda", 0))
        selftest.check_backend(attention, views)
    assert len(checked) == checks
    assert all(x[1:] == (CODECS[codec], "of layer 0") for x in checked)
