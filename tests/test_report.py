"""The HTML page and the verdict: self-contained, and every sentence follows from the numbers."""

import json
import re

import pytest

from oscar_sglang.calibration.methods import METHODS
from oscar_sglang.calibration.report.charts import css_class
from oscar_sglang.calibration.report.page import page, read_evaluation
from oscar_sglang.calibration.report.svg import Canvas, Labels, decades
from oscar_sglang.calibration.report.verdict import verdict
from oscar_sglang.cli import main
from oscar_sglang.kernels.codec import CODECS


def row(codec: str, kl: float, bits: float = 2.5, **more) -> dict:
    layers = [[0.01, 0.02]] * 5
    return {
        "codec": codec, "method": codec.split("@")[0], "sink": 64, "recent": 256, "swept": False,
        "context": 2048, "documents": 4, "bits": bits, "kl": kl, "top1": 0.95, "nll": 2.0,
        "dnll": 0.01, "perplexity": 7.5, "agree": 30, "head_error": layers,
        "layer_error": [0.015] * 5, "window_bytes": 320 << 20, "bits_with_windows": 4.9,
    } | more  # fmt: skip


@pytest.fixture
def evaluation():
    exact = row("exact", 0.0, 16, perplexity=7.4, method="exact")
    return {
        "setup": {
            "model": "a <model>", "layers": 5, "heads": 2, "kv_heads": 1, "head_dim": 64,
            "calibration": "random", "sink": 64, "recent": 256,
        },
        "concurrency": 8,
        "results": [exact, row("feedback", 0.01), row("oscar", 0.1), row("omni@0+128", 0.2)],
        "profile": {
            "k_mean_energy": [[0.5]] * 5, "k_spectrum": [[[0.6, 0.1, 0.05]]] * 5,
            "token_norm": [[0.8, 0.9, 1, 1.1, 1.4]] * 5, "sink_norm": [1.5] * 5,
        },
    }  # fmt: skip


def test_page_is_self_contained_and_escaped(evaluation):
    html = page(evaluation)
    assert "a &lt;model&gt;" in html and "<model>" not in html
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", html)
    assert html.count("<svg") == html.count("</svg>") >= 5
    for sentence in verdict(evaluation):
        assert sentence.replace("'", "&#x27;") in html


def test_page_without_profile_heads_or_text(evaluation):
    del evaluation["profile"]
    evaluation["results"] = [
        {"codec": c, "method": c, "sink": 0, "recent": 0, "context": None, "recall": {"4096": r}}
        for c, r in (("exact", 1.0), ("naive", 0.5))
    ]
    assert "50% at 4,096 tokens (exact 100%)" in page(evaluation)


def test_verdict_says_what_it_costs(evaluation):
    first, second, *_ = verdict(evaluation)
    assert "feedback at 2.50 bits changes this model's predictions little: 0.0100 nats" in first
    assert "perplexity 7.40 to 7.50 (+1.4%)" in first
    assert "oscar, costs 10.0 times as much" in second


@pytest.mark.parametrize(
    "kl, words", [(0.001, "next to nothing"), (0.03, "noticeably"), (3, "too much to serve")]
)
def test_verdict_grades(evaluation, kl, words):
    evaluation["results"][1]["kl"] = kl
    assert words in verdict(evaluation)[0]


def test_verdict_names_layers_options_and_rivals(evaluation):
    feedback = evaluation["results"][1]
    feedback["layer_error"] = [0.01, 0.01, 0.09, 0.01, 0.05]
    evaluation["results"] += [row("accurate", 0.008), row("lloyd", 0.005, 2.25)]
    text = " ".join(verdict(evaluation))
    assert "Layers 2 (9.0%), 4 (5.0%) suffer most" in text
    assert "Try accurate: KL 0.0080" in text
    assert "lloyd does better on this model" in text


def test_verdict_advises_windows(evaluation):
    for sink, recent, kl in ((4, 256, 0.0105), (64, 128, 0.03), (0, 256, 0.02)):
        swept = row("feedback", kl, sink=sink, recent=recent, swept=True)
        swept["window_bytes"] = (sink + recent) << 20
        evaluation["results"].append(swept)
    text = " ".join(verdict(evaluation))
    assert "Windows of 4 + 256 tokens are enough here: KL 0.0105 for 81% of" in text
    assert "sink + recent" in page(evaluation)


def test_labels_do_not_overlap():
    canvas = Canvas()
    labels = Labels(canvas)
    for i in range(12):
        labels.place(300, 100 + i, f"codec-{i}", "label")
    boxes = labels.taken
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize(
    "low, high, labels",
    [(0.009, 0.11, ["0.01", "0.02", "0.05", "0.1"]), (0.001, 1, ["0.001", "0.01", "0.1", "1"])],
)
def test_log_ticks(low, high, labels):
    assert [label for _, label in decades(low, high)] == labels


def test_report_command(evaluation, tmp_path, capsys):
    path, html = tmp_path / "e.json", tmp_path / "new" / "e.html"
    path.write_text(json.dumps(evaluation))
    assert main(["report", str(path), "--html", str(html)]) == 0
    assert html.read_text() == page(read_evaluation(path))
    path.write_text("{}")
    assert main(["report", str(path), "--html", str(html)]) == 2
    assert "holds no finished evaluation" in capsys.readouterr().err


def test_every_served_codec_has_its_family(evaluation):
    """``position`` was drawn as a baseline, and called a rival of the project's other codecs."""
    ours = {name for name in METHODS if css_class(name) == "ours"}
    assert ours == {name for name, codec in CODECS.items() if codec.family == "ours"}
    assert {"feedback", "position", "accurate-compact"} <= ours
    published = ("oscar", "oscar-proxy", "lloyd", "omni", "omni-rotation")
    assert {css_class(name) for name in published} == {"served"}
    assert {css_class(name) for name in ("quarot", "exact", "gone since")} == {"base"}
    evaluation["results"].append(row("position", 0.002, 2.25))
    text = " ".join(verdict(evaluation))
    assert "Try position: KL 0.0020" in text and "position does better" not in text
