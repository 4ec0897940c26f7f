import argparse

import pytest

from oscar_sglang.config import (
    OscarConfig,
    OscarError,
    add_arguments,
    cache_dir,
    flag,
    option_names,
)


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(argv)
    return OscarConfig.from_options({name: getattr(args, name) for name in option_names()})


def test_defaults_and_flags():
    assert parse() == OscarConfig()
    got = parse("--oscar-codec", "oscar", "--oscar-sink-tokens", "4", "--oscar-artifact", "x")
    assert (got.codec, got.sink_tokens, got.artifact) == ("oscar", 4, "x")
    assert got.recent_tokens == 256


def test_every_field_has_a_flag():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name in option_names():
        assert flag(name.removeprefix("oscar_")) in parser._option_string_actions


@pytest.mark.parametrize(
    "options, words",
    [
        ({"oscar_sink_tokens": 0}, "--oscar-sink-tokens"),
        ({"oscar_omni_norm": "row"}, "--oscar-omni-norm 'row' is unknown; choose head or none"),
        ({"oscar_omni_norm": "none", "oscar_codec": "lloyd"}, "belongs to codec omni"),
        ({"oscar_recent_tokens": -1}, "--oscar-recent-tokens"),
        ({"oscar_prefix_window": "half"}, "--oscar-prefix-window 'half'.*reuse, recompute"),
        ({"oscar_prefill_attention": "fa2"}, "--oscar-prefill-attention 'fa2'.*fa3, flashinfer"),
        ({"oscar_recent_tokens": 1.5}, "whole number"),
        ({"oscar_sink_cache_tokens": 0}, "--oscar-sink-cache-tokens"),
        ({"oscar_codec": "zip"}, "feedback, accurate, compact"),
        ({"oscar_codek": "oscar"}, "unknown option.*oscar_codek"),
    ],
)
def test_bad_options_say_what_to_do(options, words):
    with pytest.raises(OscarError, match=words):
        OscarConfig.from_options(options)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        OscarConfig().codec = "oscar"


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OSCAR_SGLANG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_dir()) == "/x/oscar_sglang"
