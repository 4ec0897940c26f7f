"""Every argument of SGLang's server has a place in the table of ``flags.py``."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs

from oscar_sglang.config import OscarError
from oscar_sglang.plugin import flags, refusals

TESTS = Path(__file__).parent
DEFAULTS = flags.field_defaults(ServerArgs)


def test_every_field_stands_in_one_class():
    classes = flags.classes()
    assert not (new := sorted(set(DEFAULTS) - set(classes))), f"look at what these do: {new}"
    assert not (gone := sorted(set(classes) - set(DEFAULTS))), f"SGLang has no longer: {gone}"
    assert not (twice := {f: c for f, c in classes.items() if len(c) != 1}), twice


@pytest.mark.parametrize("test", flags.WORKS)
def test_what_works_names_a_test_that_exists(test):
    file, name = test.split("::")
    functions = [n.name for n in ast.parse((TESTS / file).read_text()).body if hasattr(n, "name")]
    assert name in functions


@pytest.mark.parametrize("row", flags.REFUSED, ids=lambda row: row.field)
def test_a_refused_flag_is_off_by_default_and_named(row):
    default = DEFAULTS[row.field]
    assert default is MISSING or row.message(default) is None
    on = True if row.off == flags.OFF else 2 if row.off == flags.SIZE else "something"
    with pytest.raises(OscarError, match=f"{row.flag}.*{re.escape(row.way or f'drop {row.flag}')}"):
        refusals.refuse_options(SimpleNamespace(**{row.field: on}))
    for value in row.off:
        refusals.refuse_options(SimpleNamespace(**{row.field: value}))


def test_details_belong_to_what_is_refused():
    assert set(flags.DETAILS) <= {row.field for row in flags.REFUSED}


@pytest.mark.parametrize("flag", ["--attn-cp-size", "--enable-prefill-cp"])
def test_every_spelling_of_context_parallelism_is_refused(flag):
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    action = parser._option_string_actions[flag]
    spellings = [s for s, a in parser._option_string_actions.items() if a.dest == action.dest]
    for spelling in spellings:
        values = [] if action.nargs == 0 else ["2"]
        args = parser.parse_args(["--model-path", "m", spelling, *values])
        with pytest.raises(OscarError, match=f"drop {flag}"):
            refusals.refuse_options(args)


@pytest.mark.parametrize("phase, backend", [("prefill", "full"), ("decode", "breakable")])
def test_graphs_in_json(phase, backend):
    with pytest.raises(OscarError, match=f"--cuda-graph-backend-{phase} {backend}"):
        refusals.refuse_options(SimpleNamespace(cuda_graph_config={phase: {"backend": backend}}))


def test_a_field_that_nobody_has_looked_at_is_refused(monkeypatch):
    monkeypatch.setattr(refusals, "field_defaults", lambda _: {"move_rows": False, "port": 1})
    refusals.refuse_unknown(SimpleNamespace(move_rows=False, port=2))
    with pytest.raises(OscarError, match="--move-rows.*has not been looked at; drop it"):
        refusals.refuse_unknown(SimpleNamespace(move_rows=True, port=1))


def test_classes_of_models_that_look_ahead():
    """A model of SGLang that asks for attention to later tokens is refused by name, or, where its
    config decides, by config or when it is built. A new one must be looked at."""
    folder = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "models"
    found = {}
    for path in folder.glob("*.py"):
        text = path.read_text()
        if "AttentionType.ENCODER_ONLY" in text or "AttentionType.DECODER_BIDIRECTIONAL" in text:
            entries = [n for n in ast.parse(text).body if isinstance(n, ast.Assign)]
            entries = [n.value for n in entries if n.targets[0].id == "EntryClass"]
            names = {x.id for e in entries for x in ast.walk(e) if isinstance(x, ast.Name)}
            found[path.stem] = names
    drafts = {"dflash", "dspark_minimax"}  # of speculative decoding
    by_config = {"qwen3_5", "gemma3_causal", "lfm2", "whisper"}
    by_name = {n for stem in set(found) - drafts - by_config for n in found[stem]}
    assert by_name <= set(refusals.BIDIRECTIONAL), by_name - set(refusals.BIDIRECTIONAL)
    assert by_config <= set(found)
