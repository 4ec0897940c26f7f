"""Which layers have K and V: as SGLang counts them, and checked where they are built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from oscar_sglang.artifact.fingerprint import Fingerprint, FingerprintError, attention_layers
from oscar_sglang.config import OscarError
from oscar_sglang.pool.cpu_backend import refuse_kinds, refuse_layers
from oscar_sglang.pool.memory_pool import OscarKVPool

_SHAPE = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=128)
_GRANITE = ["mamba", "attention", "mamba", "attention"]
CONFIGS = {
    "LFM2": (
        Lfm2Config,
        dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, **_SHAPE),
        [1, 3],
    ),
    "Granite hybrid": (
        GraniteMoeHybridConfig,
        dict(num_hidden_layers=4, layer_types=_GRANITE, mamba_n_heads=4, **_SHAPE),
        [1, 3],
    ),
    "Granite hybrid, as transformers 5 writes it": (
        GraniteMoeHybridConfig,
        dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            mamba_n_heads=4,
            **_SHAPE,
        ),
        [1, 3],
    ),
    "LFM2 MoE": (
        Lfm2MoeConfig,
        dict(num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"], **_SHAPE),
        [2],
    ),
    "Falcon-H1": (FalconH1Config, dict(num_hidden_layers=2, **_SHAPE), [0, 1]),
    "Nemotron-H": (
        NemotronHConfig,
        dict(hybrid_override_pattern="M-M*-ME*-", num_hidden_layers=9, **_SHAPE),
        [3, 7],
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_those_of_sglang(tmp_path, name):
    make, config, expected = CONFIGS[name]
    assert list(make(**config).full_attention_layer_ids) == expected
    assert attention_layers(config, config["num_hidden_layers"]) == expected
    found = Fingerprint.of(tmp_path, {**config, "architectures": [name]})
    assert found.layers == len(expected)


def test_other_spellings():
    assert attention_layers({"full_attn_idxs": [1, 3]}, 4) == [1, 3]
    assert attention_layers({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, 4) == [2]
    # A model cut to fewer layers than its config lists.
    assert attention_layers({"layer_types": ["conv", "full_attention"] * 2}, 2) == [1]


@pytest.mark.parametrize(
    "kinds, words", [(["full_attention", "hyena"], "does not know: hyena"), (["conv"], "1 layers")]
)
def test_what_is_not_known_is_not_counted(tmp_path, kinds, words):
    config = dict(num_hidden_layers=2, layer_types=kinds, architectures=["A"], **_SHAPE)
    with pytest.raises(FingerprintError, match=f"{tmp_path}.*{words}"):
        Fingerprint.of(tmp_path, config)


def layer(layer_id: int, **changes) -> RadixAttention:
    return RadixAttention(4, 64, 1.0, num_kv_heads=2, layer_id=layer_id, **changes)


def test_layers_of_the_model_that_was_built():
    model = torch.nn.ModuleList([layer(1), layer(3)])
    refuse_layers(model, [1, 3], 2, 64)
    for ids in ([1], [1, 2], [0, 1, 2, 3]):
        with pytest.raises(OscarError, match=r"in layers \[1, 3\].*parameters for layers"):
            refuse_layers(model, ids, 2, 64)
    with pytest.raises(OscarError, match=r"in layers \[\]"):
        refuse_layers(torch.nn.Linear(1, 1), [0], 2, 64)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only attention"),
        (dict(is_cross_attention=True), "cross attention"),
        (dict(sliding_window_size=128), "a sliding window"),
        (dict(v_head_dim=32), "K heads of 64 and V heads of 32 channels"),
    ],
)
def test_a_layer_that_int2_cannot_serve_stops_the_start(changes, words):
    model = torch.nn.ModuleList([layer(0), layer(1, **changes)])
    with pytest.raises(OscarError, match=f"layer 1 uses {words}.*drop --kv-cache-dtype int2"):
        refuse_kinds(model)


@pytest.mark.parametrize("shape", [(2, 128), (4, 64)])
def test_layers_of_another_shape_than_the_pool(shape):
    """Families exist whose layers differ: the configuration names one of them."""
    with pytest.raises(OscarError, match=r"layer 0 has 2 KV heads of 64 .*pool.*drop --kv-cache"):
        refuse_layers(torch.nn.ModuleList([layer(0)]), [0], *shape)


def test_layers_that_sglangs_class_for_transformers_keeps_aside():
    model = torch.nn.Linear(1, 1)
    model.attention_instances = {0: layer(0), 1: layer(1)}
    refuse_layers(model, [0, 1], 2, 64)


@pytest.mark.parametrize("wrong", ["pool", "plan", "layer_ids", "params", "specs"])
def test_a_pool_of_other_layers_is_not_built(wrong):
    """A check that neither ``python -O`` nor a model of another kind can pass over."""
    count = dict.fromkeys(("pool", "plan", "layer_ids", "params", "specs"), 2) | {wrong: 3}
    pool = object.__new__(OscarKVPool)
    pool.layer_num, pool.head_num, pool.head_dim = count["pool"], 2, 64
    pool.setup = SimpleNamespace(
        plan=SimpleNamespace(layers=count["plan"]),
        specs=[None] * count["specs"],
        layer_ids=(0,) * count["layer_ids"],
        params=[None] * count["params"],
    )
    with pytest.raises(OscarError, match="differ: .*drop --kv-cache-dtype int2"):
        pool._create_buffers()
