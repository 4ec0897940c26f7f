"""The pool inside SGLang's model runner: quality, and codes that do not depend on scheduling.

Each runner lives in a process of its own, because SGLang keeps one configuration per process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from oscar_sglang.artifact import file as art
from oscar_sglang.kernels.layout import WindowLayout
from scripts.lib.pool_quality import ROWS, compare, exact_logprobs
from tests.support import forks
from tests.support.runner import result_of
from tests.support.vectors import DATA

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
DOCUMENT = "test_code_inspect"
CODECS = ("feedback", "aligned", "oscar")
# The committed measurement that the table of codecs is made of.
RESULTS = ROOT / "scripts" / "results" / "pool-quality-smollm2.json"


@pytest.fixture(scope="module")
def emulated(reference_model, artifacts, documents):
    """KL of the document per codec, by an emulation in transformers that has no pool."""
    from tests.support.quantised_cache import QuantisedCache

    ids = documents[DOCUMENT]
    exact = exact_logprobs(reference_model, ids)
    found = {}
    for codec in CODECS:
        artifact = art.load(artifacts[codec])
        prefix = len(ids) - ROWS
        with QuantisedCache(reference_model, artifact, WindowLayout(), exact_prefix=prefix):
            found[codec] = compare(exact, exact_logprobs(reference_model, ids), ids).kl
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_kl_of_the_pool(smollm2, artifacts, emulated, codec, tmp_path):
    out = tmp_path / "result.json"
    argv = ["--model", smollm2, "--artifact", artifacts[codec], "--json", out]
    argv += ["--tokens", DATA / "smollm2_tokens.npz", "--documents", DOCUMENT]
    log = tmp_path / "log"
    assert forks.start("scripts.eval_pool", argv, os.environ, log).wait() == 0, log.read_text()
    (result,) = json.loads(out.read_text())
    assert result["codec"] == codec and result["bits"] == 2.5
    assert result["kl"] == pytest.approx(emulated[codec], rel=0.02)
    published = {r["codec"]: r["documents"] for r in json.loads(RESULTS.read_text())}
    assert result["kl"] == pytest.approx(published[codec][DOCUMENT]["kl"], rel=0.05)


def test_order_of_the_codecs(emulated):
    assert emulated["feedback"] < emulated["aligned"] < emulated["oscar"]


@pytest.fixture(scope="module")
def codes(smollm2, artifacts):
    def run(page_size: int) -> dict:
        return result_of("pool_codes", smollm2, artifacts["feedback"], page_size)

    return {page_size: run(page_size) for page_size in (1, 4)}


def test_codes_do_not_depend_on_scheduling(codes):
    """K and V themselves differ in the last float32 bits between batch shapes (the model's own
    matrix products), so a few values on a rounding tie fall the other way: at most 1 in 2,000 code
    bytes and 1 in 300 FP16 metadata, those by no more than FP16 spacing. Rows fed directly are
    bit-identical (test_reference.py)."""
    for name, way in codes[1]["ways"].items():
        assert way["codes"] < 5e-4 and way["meta"] < 1 / 300, (name, way)
        assert way["meta_spacings"] <= 1, (name, way)


def test_codes_do_not_depend_on_page_size(codes):
    assert codes[1]["digest"] == codes[4]["digest"]
    assert codes[1]["ways"] == codes[4]["ways"]
