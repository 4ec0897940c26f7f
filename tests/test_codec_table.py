"""The table of codecs in calibration/README.md is that of the memory plan and the measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oscar_sglang.cli import codecs
from oscar_sglang.config import OscarConfig
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.pool.sizing import ROW_SLACK, make_plan
from scripts import codec_table

README = Path(__file__).parents[1] / "calibration" / "README.md"


def test_the_readme_shows_the_table():
    readme = README.read_text().splitlines()
    for line in codec_table.table():
        assert line in readme, "run scripts/codec_table.py"


def test_the_readme_knows_every_codec_and_where_it_is_from():
    """As ``oscar-sglang codecs`` does."""
    readme = README.read_text()
    for row in codecs.rows():
        assert f"`{row.name}`" in readme
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", row.published):
            assert paper in readme


@pytest.mark.parametrize("codec", CODECS)
def test_bits_are_those_of_the_plan_a_server_makes(codec):
    plan = make_plan(
        OscarConfig(codec=codec), layers=36, kv_heads=8, head_dim=128, itemsize=2,
        budget_bytes=64 << 30, max_running_requests=8, device="cuda", context_length=131072,
    )  # fmt: skip
    for context in codec_table.CONTEXTS:
        assert codec_table.bits(codec, context) == plan.effective_bits(context)
    # A store of a row at head_dim 128: 32 bytes of codes and the metadata, for K and for V.
    # omni: a norm and V's two numbers; step and lo of 128 channels over 128 tokens.
    meta = {"affine": 8, "compact": 4, "position": 4, "scale": 4, "channel": 6 + 4}[
        CODECS[codec].meta.name
    ]
    assert plan.bytes_per_token == 36 * 8 * (64 + meta)
    floats = sum(t.numel() for t in _tensors(codec)) // 8
    tables = 0
    if CODECS[codec].meta.name == "position":  # lift, metric in FP16; mix; partner; units
        floats += 2 * 128 * 128 // 2 + 2 * 128 + 128 + 2
        tables = (131072 + ROW_SLACK) // 16 * 128 * 2
    assert plan.codec_bytes == 36 * 8 * 4 * floats + tables


def _tensors(codec: str):
    from oscar_sglang.artifact.file import Fingerprint, data_free

    fingerprint = Fingerprint("LlamaForCausalLM", 1, 32, 8, 128, "{}", "{}", "0")
    return data_free(fingerprint, codec).tensors().values()
