"""Every codec that is not the default: served as it is judged, and through HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_sglang.calibration import Plan, calibrate_codecs
from oscar_sglang.kernels.codec import CODECS
from scripts.lib import tiny_models
from tests.support.runner import result_of
from tests.support.server import Server

pytestmark = pytest.mark.sglang

JUDGED = ("accurate", "compact", "lloyd", "omni", "position")
SERVED = ("accurate-compact", "lloyd", "omni", "position")
MIXED = 2.75  # bits of ``position``: one of two layers' K and V in 4 bits, the rest in 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = {}
    for name, made in calibrate_codecs(Plan(model, tokens=600, bits=MIXED), JUDGED).items():
        paths[name] = folder / f"{name}.safetensors"
        made.save(paths[name])
    return paths


@pytest.mark.parametrize("codec", JUDGED)
def test_server_and_evaluator_give_the_same_codes(model, artifacts, codec):
    """SGLang and transformers compute K and V in other float32 orders, so a few numbers lie on
    the other side of a rounding tie: at most 1 row in 50, where every row has 64 codes."""
    found = result_of("codec_parity", model, artifacts[codec])
    assert found["codec"] == codec
    assert found["equal"] > 0.98
    assert found["bits"]["server"] == found["bits"]["eval"]
    bits = MIXED if codec == "position" else CODECS[codec].layout(2, 64).bits_per_element
    assert found["bits"]["server"] == bits


def test_a_codec_in_one_file(model, tmp_path):
    """Nothing but ``toy_codec.py`` knows it, and the pool serves what the evaluator judges. Its
    bits at head_dim 64: 2, and a 16-bit number a row."""
    found = result_of("toy_codec", model, tmp_path)
    served = found["served"]
    assert served["codec"] == "toy" and served["equal"] > 0.98
    assert served["bits"] == {"server": 2.25, "eval": 2.25}
    assert 0 < found["kl"]["toy"] < 0.1 and found["css"] == "ours"
    assert "toy" in (tmp_path / "toy.html").read_text()


@pytest.mark.parametrize("codec", SERVED)
def test_http_server(tiny_llama, tmp_path, codec):
    """Chosen by its flag; memory as planned, a prefix hit and decoding beyond the windows."""
    flags = ["--kv-cache-dtype", "int2", "--oscar-codec", codec, "--dtype", "float32"]
    flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "1024"]
    flags += ["--max-running-requests", "2", "--oscar-sink-tokens", "8"]
    flags += ["--oscar-recent-tokens", "16", "--oscar-debug-tags"]
    spec = CODECS[codec]
    first = 2 * (spec.block if spec.block > 1 else 45)  # a cached prefix, whole pages of it
    ids = [1 + i % 250 for i in range(first + 16)]
    with Server(tiny_llama, tmp_path / "log", *flags) as server:
        server.generate([*ids[: first + 9], 1], 4)
        answer = server.generate([*ids, *ids[:16], 7, 8, 9], 8)
        state = server.state()
        assert len(answer["output_ids"]) == 8
        assert answer["meta_info"]["cached_tokens"] >= first > 8 + 16  # a history of codes
        assert state["codec"] == codec
        assert state["bits_per_element"] == spec.layout(2, 64).bits_per_element
        assert state["recent_tokens"] == spec.ring_tokens(16)
        for part, planned in state["planned_bytes"].items():
            assert state["bytes"][part] == pytest.approx(planned, rel=0.01), part
        assert state["bytes_per_token"] == 2 * CODECS[codec].layout(2, 64).bytes_per_slot
        log = server.log.read_text()
        assert f"codec {codec}" in log and "OwnershipError" not in log
