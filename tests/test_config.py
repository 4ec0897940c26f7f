import argparse

import pytest

from oscar_sglang.cache import cache_dir
from oscar_sglang.config import (
    OscarConfig,
    OscarError,
    add_arguments,
    config_of_dtype,
    flag,
    fold_options,
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
        ({"oscar_parked_rows": 4}, "--oscar-parked-rows needs --oscar-prefix-window park"),
        ({"oscar_prefix_window": "half"}, "--oscar-prefix-window 'half'.*reuse, recompute"),
        ({"oscar_prefill_attention": "fa2"}, "--oscar-prefill-attention 'fa2'.*fa3, flashinfer"),
        ({"oscar_recent_tokens": 1.5}, "whole number"),
        ({"oscar_sink_cache_tokens": 0}, "--oscar-sink-cache-tokens"),
        ({"oscar_bits": 1.5}, "--oscar-bits is bits per element, e.g. 2.3, got 1.5"),
        ({"oscar_bits": True}, "--oscar-bits"),
        ({"oscar_bits": 2.3, "oscar_codec": "omni"}, "--oscar-bits belongs to codec position"),
        ({"oscar_codec": "zip"}, "feedback, accurate, compact"),
        ({"oscar_codek": "oscar"}, "unknown option.*oscar_codek"),
    ],
)
def test_bad_options_say_what_to_do(options, words):
    with pytest.raises(OscarError, match=words):
        OscarConfig.from_options(options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"oscar_codec": "omni", "oscar_omni_norm": "none"},
        {"oscar_bits": 2.35},
        {"oscar_debug_tags": True, "oscar_debug_tags_every": 4, "oscar_artifact": "/x y/&=?.st"},
    ],
)
def test_the_dtype_carries_every_option(options):
    config = OscarConfig.from_options(options)
    assert config_of_dtype(config.dtype) == config
    assert (config.dtype == "int2") == (not options)


def test_options_move_into_the_dtype():
    assert fold_options({"kv_cache_dtype": "auto", "oscar_codec": None}) == {
        "kv_cache_dtype": "auto"
    }
    got = fold_options({"kv_cache_dtype": "int2?codec=omni", "oscar_sink_tokens": 8, "tp_size": 2})
    assert got == {"kv_cache_dtype": "int2?codec=omni&sink_tokens=8", "tp_size": 2}
    with pytest.raises(OscarError, match="oscar_codec given without --kv-cache-dtype int2"):
        fold_options({"kv_cache_dtype": "fp8_e4m3", "oscar_codec": "omni"})
    with pytest.raises(OscarError, match="recent-tokens must be a whole number.*'many'"):
        config_of_dtype("int2?recent_tokens=many")


def test_new_weights_cannot_move_the_bits_of_a_running_cache():
    default = OscarConfig()
    assert default.with_weight_update("feedback").on_weight_update == "recalibrate"
    assert default.with_weight_update("position").on_weight_update == "keep"
    asked = OscarConfig(on_weight_update="recalibrate")
    assert asked.with_weight_update("feedback") == asked
    with pytest.raises(OscarError, match="not built for codec position.*give keep or refuse"):
        asked.with_weight_update("position")


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        OscarConfig().codec = "oscar"


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OSCAR_SGLANG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_dir()) == "/x/oscar_sglang"
