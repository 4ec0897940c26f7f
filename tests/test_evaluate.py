"""``eval``: the engine against one that rebuilds the cache per row, and the command around it."""

import json

import numpy as np
import pytest
import torch

from oscar_sglang.calibration import CalibrationError, Plan, calibrate
from oscar_sglang.calibration.attention import replaced_attention
from oscar_sglang.calibration.collect import load_model
from oscar_sglang.calibration.continuation import Cache, capture
from oscar_sglang.calibration.evaluation.inputs import load_inputs
from oscar_sglang.calibration.evaluation.run import Record
from oscar_sglang.calibration.evaluation.units import Recall, Text, compare, greedy_tokens
from oscar_sglang.calibration.methods import METHODS
from oscar_sglang.cli import main
from scripts.lib.tiny_models import llama, qwen3, random_ids

N = 420


@pytest.fixture(scope="module", params=[llama, qwen3], ids=["llama-d64", "qwen3-d128"])
def model(request, tmp_path_factory):
    return load_model(request.param(tmp_path_factory.mktemp("model")), "cpu")


@pytest.fixture(scope="module")
def document(model):
    return capture(model, random_ids(N)[0], rows=20)


def params_of(name, model):
    heads = model.config.num_key_value_heads
    g = torch.Generator().manual_seed(0)
    r = torch.linalg.qr(torch.randn(2, heads, model.config.head_dim, model.config.head_dim,
                                    generator=g).double()).Q.float()  # fmt: skip
    from oscar_sglang.kernels.codec import CODECS, LayerCodec, LayerParams

    served = LayerParams(r[0], r[1], 0.05 * torch.randn(r[0].shape, generator=g).triu(1))
    served = LayerCodec(CODECS[name], served) if name in CODECS else served
    fitted = METHODS[name].fit(None) if not METHODS[name].needs_stats else served
    return [fitted] * model.config.num_hidden_layers


def brute_force(model, document, name, params, n_sink, n_recent, rows):
    """Logits of each row with K and V rebuilt from its own point of view, and with the rows
    before it seen as they were when they ran: [n, vocab]."""
    method, p = METHODS[name], document.prefix

    def attend(layer, q, k, v, scale):
        k_all = torch.cat([document.k[layer], k[0].transpose(0, 1)])
        v_all = torch.cat([document.v[layer], v[0].transpose(0, 1)])
        out = []
        for i in range(q.shape[2]):
            end = max(0, p + i + 1 - n_recent)
            end -= end % method.block
            kk, vv = k_all[: p + i + 1].clone(), v_all[: p + i + 1].clone()
            if end > n_sink:
                piece = slice(n_sink, end)
                encoded = method.encode(params[layer], k_all[piece], v_all[piece], n_sink)
                kk[piece], vv[piece] = method.decode(params[layer], encoded)
            group = q.shape[1] // kk.shape[1]
            kk, vv = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (kk, vv))
            weights = (q[0, :, i : i + 1] @ kk.mT * scale).softmax(-1)
            out.append(weights @ vv)
        return torch.cat(out, 1)[None]

    positions = torch.arange(p, p + len(rows))[None]
    with torch.no_grad(), replaced_attention(model, attend):
        return model(rows[None], position_ids=positions, use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["feedback", "kivi", "kivi-g32", "omni"])
@pytest.mark.parametrize("windows", [(64, 100), (8, 5), (0, 0), (300, 50)])
def test_engine_equals_brute_force(model, document, name, windows):
    params = params_of(name, model)
    rows = document.ids[-20:]
    cache = Cache(document, METHODS[name], params, *windows, queries=20)
    found = cache.logits(rows[None])[0]
    slow = brute_force(model, document, name, params, *windows, rows)
    assert torch.allclose(found, slow, atol=2e-4)


def test_exact_cache_gives_the_exact_logits(document):
    cache = Cache(document, None, [], 64, 256, queries=20)
    found = cache.logits(document.ids[-20:][None])[0]
    assert torch.allclose(found, document.logits, atol=1e-4)
    assert cache.bits == 16
    assert float(cache.output_error(1).max()) < 1e-9


def test_continuations_are_independent(model, document):
    cache = Cache(document, METHODS["feedback"], params_of("feedback", model), 16, 64, 20)
    rows = torch.stack([document.ids[-20:], random_ids(20)[0]])
    both = cache.logits(rows)
    for row, logits in zip(rows, both, strict=True):
        assert torch.allclose(cache.logits(row[None])[0], logits, atol=1e-4)


def test_output_error_is_that_of_the_layer(model, document):
    params = params_of("aligned", model)
    errors = Cache(document, METHODS["aligned"], params, 16, 64, 20).output_error()
    assert errors.shape == (2, 4)
    assert 1e-4 < float(errors.min()) and float(errors.max()) < 3


def test_greedy_agreement_is_the_point_of_divergence(model):
    unit = Text("a", 200, random_ids(200)[0], greedy=12)
    document = unit.capture(model)
    with torch.no_grad():
        out = model.generate(
            unit.ids[None, : document.prefix + 1], max_new_tokens=12, do_sample=False
        )
    generated = out[0, document.prefix + 1 :]  # stops at EOS
    assert torch.equal(greedy_tokens(document, 12)[: len(generated)], generated)
    assert unit.measure(Cache(document, None, [], 64, 256, 129))["agree"] == 12


def test_compare_of_equal_and_shifted_logits():
    logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
    same = compare(logits, logits + 5, torch.arange(10) % 7)
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["top1"] == 1
    assert same["dnll"] == pytest.approx(0, abs=1e-6)
    assert compare(logits, -logits, torch.arange(10) % 7)["kl"] > 0.5


def test_recall_counts_whole_answers(model):
    ids = random_ids(150)[0]
    document = capture(model, ids, 1)
    answer = greedy_tokens(document, 3)
    wrong = torch.cat([answer[:2], (answer[2:] + 1) % 256])
    prompt = ids[-1:]
    unit = Recall("0", 1024, 2, ids[:-1], [(prompt, answer), (prompt, wrong)])
    found = unit.measure(Cache(unit.capture(model), None, [], 64, 256, unit.queries))
    assert (found["right"], found["asked"]) == (1, 2)


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    g = np.random.default_rng(0)
    half = g.integers(0, 256, (2, 150))
    np.savez(
        folder / "t.npz",
        test_a=g.integers(0, 256, 500),
        test_b=g.integers(0, 256, 500),
        induct=np.concatenate([half, half], 1),
        cal=g.integers(0, 256, (1, 600)),
    )
    question = {"prompt": [1, 2, 3], "answer_ids": [4]}
    document = {"context": 1024, "facts": 1, "document": g.integers(0, 256, 400).tolist()}
    (folder / "r.json").write_text(json.dumps([document | {"questions": [question]}]))
    llama(folder / "model")
    return folder


def argv(folder, out, *more: str) -> list[str]:
    fixed = ["eval", "--model", folder / "model", "--tokens", folder / "t.npz", "--context", "500"]
    fixed += ["--calibration", f"{folder / 't.npz'}:cal", "--greedy", "8", "--json", out]
    return [str(a) for a in (*fixed, *more)]


def test_eval_writes_everything(folder, tmp_path, capsys):
    out, html = tmp_path / "o" / "e.json", tmp_path / "e.html"
    more = ["--codecs", "all", "--recall", str(folder / "r.json"), "--html", str(html)]
    assert main(argv(folder, out, *more)) == 0
    printed = capsys.readouterr().out
    assert "text/500/test_a" in printed and "peak memory" in printed
    rows = {r["codec"]: r for r in json.loads(out.read_text())["results"]}
    assert {"exact", "feedback", "omni@0+128", *METHODS} <= set(rows)
    fields = {"codec", "context", "kl", "top1", "dnll", "bits", "induct", "recall", "perplexity"}
    for row in rows.values():
        assert fields <= set(row) and row["documents"] == 2
        assert len(row["layer_error"]) == 2 and len(row["head_error"][0]) == 4
    assert rows["exact"]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows["exact"]["agree"] == 8
    assert rows["feedback"]["kl"] < rows["naive"]["kl"]
    assert "<svg" in html.read_text()


def test_eval_resumes_and_adds_codecs(folder, tmp_path, capsys):
    out = tmp_path / "e.json"
    assert main(argv(folder, out, "--codecs", "quarot")) == 0
    capsys.readouterr()
    content = json.loads(out.read_text())
    content["items"]["text/500/test_a"]["quarot"]["kl"] = 123.0  # shows that it is not run again
    del content["items"]["text/500/test_b"]["quarot"]
    out.write_text(json.dumps(content))
    assert main(argv(folder, out, "--codecs", "quarot,naive")) == 0
    printed = capsys.readouterr().out
    assert printed.count("quarot  ") - printed.count("quarot   500") == 2  # test_b and the table
    rows = {r["codec"]: r for r in json.loads(out.read_text())["results"]}
    assert rows["quarot"]["kl"] > 61 and rows["naive"]["documents"] == 2


def test_eval_of_an_artifact(folder, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    calibrate(Plan(folder / "model", tokens=600)).save(path)
    base = ["eval", "--model", folder / "model", "--tokens", folder / "t.npz", "--context", "500"]
    base = [str(a) for a in (*base, "--greedy", "0", "--artifact", path)]
    assert main(base) == 0
    assert "feedback" in capsys.readouterr().out
    assert main([*base, "--codecs", "feedback,naive"]) == 0
    assert main([*base, "--codecs", "oscar"]) == 2
    assert "oscar must be calibrated, and --artifact holds feedback" in capsys.readouterr().err


def test_sweep_prices_windows(folder, tmp_path):
    out = tmp_path / "e.json"
    more = ["--codecs", "quarot", "--sweep-windows", "--concurrency", "3"]
    assert main(argv(folder, out, *more)) == 0
    rows = [r for r in json.loads(out.read_text())["results"] if r["method"] == "quarot"]
    assert len(rows) == 8 and sum(not r["swept"] for r in rows) == 1
    for row in rows:  # 2 layers, K and V, 2 heads of 64 channels, 2 bytes
        assert row["window_bytes"] == 3 * (row["sink"] + row["recent"]) * 2 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    "change, message",
    [
        (["--codecs", "nope"], "unknown codec 'nope'"),
        (["--context", "9000"], "has 500 tokens, --context asks for 9000"),
        (["--context", "100"], "at least 130 tokens"),
        (["--documents", "test_z"], "no document 'test_z'"),
        (["--tokens", "missing.npz"], "missing.npz: cannot be read"),
        (["--recall", "missing.json"], "cannot be read as recall questions"),
        (["--calibration", "missing.txt"], "missing.txt"),
    ],
)
def test_eval_refuses(folder, tmp_path, capsys, change, message):
    assert main(argv(folder, tmp_path / "e.json", "--codecs", "feedback", *change)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_eval_does_not_mix_with_another_evaluation(folder, tmp_path, capsys):
    out = tmp_path / "e.json"
    out.write_text("{}")
    with pytest.raises(CalibrationError, match="not an evaluation of oscar-sglang"):
        Record.resume({}, out, {})
    old = {"setup": {"sink": 4}, "items": {}, "jobs": {}, "hashes": {"text/9/a": "x"}}
    out.write_text(json.dumps(old))
    with pytest.raises(CalibrationError, match="holds an evaluation with another sink"):
        Record.resume({"sink": 64}, out, {})
    with pytest.raises(CalibrationError, match="another document text/9/a"):
        Record.resume({"sink": 4}, out, {"text/9/a": "y"})


def test_text_files_are_documents(folder, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(CalibrationError, match="no usable tokenizer"):
        load_inputs(folder / "model", [200], texts=[tmp_path / "a.txt"])
