"""``oscar-sglang verify --url`` against a server whose every log-probability is known."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from oscar_sglang.cli import main
from scripts.lib.tiny_models import llama

pytestmark = pytest.mark.sglang
SIZES = ["--samples", "2", "--prompt-tokens", "600", "--groups", "2", "--branches", "2"]
SIZES += ["--new-tokens", "8", "--text", "random"]
PAGE, TAIL = 16, 256


class Fake:
    """Answers as SGLang does; tokens read again are ``shift`` nats likelier than when sampled."""

    def __init__(self, shift: float = 0.0, **info) -> None:
        self.shift, self.seen, self.capacity = shift, [], info.pop("capacity", 100_000)
        self.state = {
            "page_size": PAGE,
            "memory_usage": {"token_capacity": self.capacity},
            "oscar": {"recent_tokens": TAIL, "prefix_window": "recompute"},
        }
        self.info = {"disable_radix_cache": False, "page_size": PAGE} | info

    def generate(self, body: dict) -> list[dict]:
        new, found = body["sampling_params"]["max_new_tokens"], []
        for ids in body["input_ids"]:
            common = [sum(1 for a, b in zip(ids, s, strict=False) if a == b) for s in self.seen]
            prefix = max([n for n in common if n < len(ids)], default=0)
            cached = max(0, min(prefix, len(ids) - TAIL)) // PAGE * PAGE
            meta = {"prompt_tokens": len(ids), "cached_tokens": cached}
            meta["output_token_logprobs"] = [[-1.0, 5]] * new
            meta["input_token_logprobs"] = [[-1.0 + self.shift, 5]] * len(ids)
            found.append({"output_ids": [5] * new, "meta_info": meta})
        self.seen += [ids + [5] * (new - 1) for ids in body["input_ids"]]
        return found

    def answer(self, path: str, body: dict | None) -> object:
        match path.partition("?")[0]:
            case "/server_info":
                return self.info | {"internal_states": [self.state]}
            case "/flush_cache":
                self.seen.clear()
                return {}
            case "/generate":
                return self.generate(body)
        raise KeyError(path)


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(fake: Fake) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                data = json.dumps(fake.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.12])
def test_the_figure_is_sglangs_estimate(serve, model, tmp_path, capsys, shift):
    """KL of a constant shift d of the log-ratio: exp(d) - 1 - d, here 0, 0.0052 and 0.0069."""
    out = tmp_path / "gate.json"
    url = serve(Fake(shift))
    status = main(["verify", "--url", url + "/", "--model", model, *SIZES, "--json", str(out)])
    expected = math.exp(shift) - 1 - shift
    rows = json.loads(out.read_text())["rows"]
    assert [r["case"] for r in rows] == ["turns", "prefix hit", "answer hit"]
    assert [(r["samples"], r["tokens"]) for r in rows] == [(2, 16), (4, 32), (4, 32)]
    for row in rows:
        assert row["kl"] == pytest.approx(expected, abs=1e-12)
        assert row["error"] == pytest.approx(0, abs=1e-12)
        assert row["below"] == {"default": expected < 0.003, "FP8 hybrids": expected < 0.005,
                                "DCP": expected < 0.01}  # fmt: skip
        assert row["hit"] == 1.0, "all that recompute leaves was cached"
    assert status == 0 and "KL" in capsys.readouterr().out
    assert main(["verify", "--url", url, "--model", model, *SIZES, "--limit", "0.005"]) == (
        expected > 0.005
    )


@pytest.mark.parametrize(
    "fake, message",
    [
        (Fake(disable_radix_cache=True), "keeps no prefixes"),
        (Fake(capacity=900), "holds 900 tokens, the longest sequence has 1624"),
        (Fake(shift=math.nan), "not comparable"),
    ],
)
def test_what_cannot_be_measured_is_an_error(serve, model, capsys, fake, message):
    assert main(["verify", "--url", serve(fake), "--model", model, *SIZES]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_no_hit_is_no_measurement(serve, model, capsys):
    fake = Fake()
    fake.seen = type("Forgets", (list,), {"__iadd__": lambda self, _: self})()
    assert main(["verify", "--url", serve(fake), "--model", model, *SIZES]) == 2
    assert "nothing was cached" in capsys.readouterr().err


def test_no_server_and_no_model_are_errors(model, capsys):
    url = "http://127.0.0.1:9"
    assert main(["verify", "--url", url, "--model", model, *SIZES]) == 2
    assert "is the server up and idle?" in capsys.readouterr().err
    assert main(["verify", "--url", url]) == 2
    assert "does not answer as an SGLang server" in capsys.readouterr().err
    assert main(["verify", "artifact.safetensors"]) == 2
    assert "needs --model" in capsys.readouterr().err
