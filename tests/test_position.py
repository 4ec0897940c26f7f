"""Codec ``position`` and what it is fitted from: turns, moments before RoPE, keys anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves

from oscar_sglang.calibration import fit_position
from oscar_sglang.calibration.attention import (
    attention_layers_of,
    causal_attention,
    replaced_attention,
)
from oscar_sglang.calibration.collect import collect, load_model, model_turning
from oscar_sglang.calibration.fit import fit_layer
from oscar_sglang.calibration.rope import Turning, checked, turned_back, turning
from oscar_sglang.calibration.stats import LayerStats, Moments
from oscar_sglang.kernels import codec, codec_compact, codec_position
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.codec_position import TILE, Rope
from scripts.lib.tiny_models import FAMILIES, family, random_ids

D, HK = 64, 2
THETA = [10000 ** (-2 * i / D) for i in range(D // 2)]
ROPES = {
    "half": Rope.of(THETA, D),
    "adjacent": Rope.of(THETA, D, adjacent=True),
    "partial": Rope.of(THETA[:8], D),
    "partial adjacent": Rope.of(THETA[:8], D, adjacent=True),
    "none": Rope.still(D),
}


def normal(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the turn


@pytest.mark.parametrize("kind, turn", [("half", turn_halves), ("adjacent", turn_adjacent)])
def test_turn_is_what_models_do(kind, turn):
    x, at = normal(50, HK, D).float(), torch.arange(50) * 7
    angle = at[:, None].double() * torch.tensor(THETA)
    cos, sin = (torch.cat([f(angle)] * 2, -1).float()[None] for f in (torch.cos, torch.sin))
    want = turn(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    assert torch.allclose(ROPES[kind].turn(x, at).float(), want, atol=1e-5)


@pytest.mark.parametrize("kind", ROPES)
def test_turn_back(kind):
    x, at = normal(9, HK, D), torch.randint(0, 131072, (9,))
    turned = ROPES[kind].turn(x, at)
    assert torch.allclose(ROPES[kind].turn(turned, at, back=True), x, atol=1e-9)
    assert torch.equal(turned, x) == (kind == "none")


SCALED = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, truncated by none": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_frequencies_are_those_of_transformers(name, partial):
    settings = {"rope_theta": 500000.0, "partial_rotary_factor": partial, **SCALED[name]}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=131072,
        rope_parameters=settings,
        partial_rotary_factor=partial,
    )
    kind = settings.get("rope_type", "default")
    if kind == "default":
        n = int(D * partial) // 2
        want = 500000.0 ** (-torch.arange(n) / n)
    else:
        want = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=None)[0]
    found = turning(config.to_dict(), D, [0])
    assert found.doubt is None
    theta = torch.tensor(found.rope.theta)
    assert torch.allclose(theta[: len(want)], want.float(), rtol=1e-5)
    assert not theta[len(want) :].any()


def test_unknown_rope_is_said_and_not_guessed():
    text = {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "factor": 2}}
    found = turning(text, D, [0])
    assert found.rope == Rope.still(D) and "longrope" in found.doubt
    lacking = turning({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, D, [0])
    assert lacking.rope == Rope.still(D) and "factor" in lacking.doubt


def test_layers_without_rope():
    text = {"rope_theta": 1e4, "no_rope_layers": [1, 1, 1, 0, 1, 0]}
    found = turning(text, D, [0, 2, 3, 5])
    assert found.free == (2, 3)
    assert found.of_layer(3) == Rope.still(D) and found.of_layer(1) == found.rope


def test_the_check_finds_the_pairs_and_refuses_what_does_not_turn_so():
    key, at = normal(1, HK, D), torch.arange(40)
    for kind in ("half", "adjacent", "partial", "none"):
        keys = ROPES[kind].turn(key.expand(40, HK, D), at).bfloat16().float()
        for told in ("half", "adjacent") if kind != "partial" else ("partial", "partial adjacent"):
            found = checked(Turning(ROPES[told]), keys)
            assert found.rope == ROPES[kind] and found.doubt is None
    faster = ROPES["half"].turn(key.expand(40, HK, D), 2 * at).float()
    found = checked(Turning(ROPES["half"]), faster)
    assert found.rope == Rope.still(D) and "do not turn" in found.doubt


WITHOUT_ROPE = ("nemotron-h", "granite-hybrid")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_turns_as_found(name, tmp_path):
    """Of models whose first layer has attention the keys themselves say so."""
    model = load_model(family(name, tmp_path), "cpu")
    found = model_turning(model, 7)
    assert found.doubt is None and any(found.rope.theta) != (name in WITHOUT_ROPE)
    if attention_layers_of(model)[0]:
        return
    keys = []

    def attend(layer, q, k, v, scale):
        if layer == 0:
            keys.append(k[0].transpose(0, 1))
        return causal_attention(q, k, v, scale)

    with replaced_attention(model, attend), torch.no_grad():
        model(torch.full((1, 100), 9))
    assert turned_back(found.rope, keys[0]) < 1e-4
    assert turned_back(Rope.still(keys[0].shape[-1]), keys[0]) > 0.1


# ---- the mean where a token stands


@pytest.mark.parametrize("kind", ROPES)
def test_mean_of_a_tile(kind):
    """w is the mean of RoPE_t(mu) over the tile, to the rounding of the FP16 table; also as a
    product with the table, in the model's basis and in A's."""
    rope, mu = ROPES[kind], normal(HK, D)
    mean, tiles = codec_position.tile_mean(rope, mu), torch.tensor([0, 1, 517, 8191])
    at = (TILE * tiles[:, None] + torch.arange(TILE)).flatten()
    want = rope.turn(mu.expand(len(at), HK, D), at).view(len(tiles), TILE, HK, D).mean(1)
    found = rope.mean_rows(mean, tiles)
    assert torch.allclose(found, want, atol=4e-3)
    norms = mean.norm(dim=-1)
    assert torch.allclose(found.norm(dim=-1), norms.expand(len(tiles), HK), rtol=1e-3)
    table = rope.table(8192)[tiles]
    assert table.dtype == torch.float16 and table.numel() * 2 == codec_position.table_bytes(D, 64)
    matrix = codec_position.mean_matrix(rope, mean)
    product = torch.einsum("nd,hde->nhe", table.double(), matrix)
    assert torch.allclose(product, found, atol=1e-12)
    a = normal(HK, D, D).float()
    lift, unit = codec_position.lift_of(rope, mean, a)
    lifted = torch.einsum("nd,hde->nhe", table.double(), lift.double()) * unit[:, None]
    exact = torch.einsum("nhd,hde->nhe", found, a.double())
    assert (lifted - exact).norm() / exact.norm() < 1e-3
    assert bool((lift.abs().amax((1, 2)) >= 2**13).all()) and bool(lift.isfinite().all())
    assert torch.equal(unit.log2(), unit.log2().round())


def test_no_mean_no_lift():
    lift, unit = codec_position.lift_of(ROPES["half"], torch.zeros(HK, D), torch.ones(HK, D, D))
    assert not lift.any() and bool((unit == 1).all())


# ---- moments


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("first, last", [(64, 65), (0, 300), (64, 2000)])
def test_turned_moment_is_the_mean_over_positions(kind, first, last):
    rope, x = ROPES[kind], normal(40, HK, D)
    moment = torch.einsum("nhd,nhe->hde", x, x) / len(x)
    want = torch.zeros_like(moment)
    for t in range(first, last):
        y = rope.turn(x, torch.full((len(x),), t))
        want += torch.einsum("nhd,nhe->hde", y, y) / len(x)
    found = fit_position.turned_moment(rope, moment, first, last)
    assert torch.allclose(found, want / (last - first), atol=1e-9)


def test_residual_moment_is_that_of_keys_without_their_share():
    rope, mu = ROPES["half"], 3 * normal(HK, D, seed=1)
    mean = codec_position.tile_mean(rope, mu)
    before = mu + normal(500, HK, D)
    ktk, want = torch.einsum("nhd,nhe->hde", before, before) / 500, 0
    for j in range(TILE):  # the same keys at every offset of a tile
        at = torch.full((500,), 3 * TILE + j)
        k = rope.turn(before, at)
        w = rope.turn(mean[None], at[:1] - j)
        rest = k - (k * w).sum(-1, keepdim=True) / mean.square().sum(-1, keepdim=True) * w
        rest = rope.turn(rest, at, back=True)
        want = want + torch.einsum("nhd,nhe->hde", rest, rest) / 500 / TILE
    found = fit_position.residual_moment(rope, ktk, mean)
    assert torch.allclose(found, want, atol=1e-9)
    nothing = fit_position.residual_moment(rope, ktk, torch.zeros_like(mean))
    assert torch.allclose(nothing, ktk)


def seen(last: int, seed: int = 3) -> Moments:
    """Moments of keys with a large mean before RoPE, at positions 8 .. last."""
    rope, positions = ROPES["half"], torch.arange(8, last)
    n, spread = len(positions), torch.linspace(0.2, 2, D)
    mu = 4 * normal(HK, D, seed=1)
    k = rope.turn(mu + spread * normal(n, HK, D, seed=seed), positions)
    q = rope.turn(normal(1, 2 * HK, D, seed=2) + normal(n, 2 * HK, D, seed=seed + 1), positions)
    v = normal(n, HK, D, seed=seed + 2)
    stats = LayerStats(512, rope)
    stats.update(positions, q, k, v, normal(n, 2 * HK, D, seed=seed + 3), positions)
    return stats.finish()


@pytest.fixture(scope="module")
def moments() -> Moments:
    return seen(900)


def test_collected_moments_before_rope(tmp_path):
    """After RoPE at the positions that were seen they are the moments after RoPE; several
    sequences add up."""
    model = load_model(family("qwen2", tmp_path), "cpu")
    (m, *_), rest = collect(model, random_ids(900), n_sink=8), random_ids(500, 400)
    assert m.before.rope == model_turning(model, 7).rope
    for name in ("ktk", "qtq"):
        turned = fit_position.turned_moment(m.before.rope, getattr(m.before, name), 8, 900)
        found, want = (torch.linalg.eigvalsh(x) for x in (turned, getattr(m, name)))
        assert (found - want).norm() / want.norm() < 0.1
        trace = getattr(m.before, name).diagonal(dim1=-2, dim2=-1).sum(-1)
        assert torch.allclose(trace, getattr(m, name).diagonal(dim1=-2, dim2=-1).sum(-1))
    assert len(m.before.held_positions) == len(m.held_k)
    both = collect(model, rest, n_sink=8)[0]
    assert int(both.before.held_positions.min()) >= 8
    assert int(both.before.held_positions.max()) < 500


def test_moments_before_rope_do_not_depend_on_the_context():
    """K's mean after RoPE vanishes with the context; before RoPE it stays."""
    short, long = seen(400), seen(4000)
    size = short.before.k_mean.norm()
    assert (long.before.k_mean - short.before.k_mean).norm() / size < 0.05
    assert (long.k_mean - short.k_mean).norm() / short.k_mean.norm() > 0.2
    for m in (short, long):
        found = fit_position.turned_moment(m.before.rope, m.before.ktk, 8, 4000)
        assert (found - long.ktk).norm() / long.ktk.norm() < 0.05


# ---- the codec


def fitted(moments, **changes):
    layer = fit_layer(moments, "position", context=131072, n_sink=8)
    return replace(layer.spec, **changes), layer.params


def test_error_does_not_depend_on_the_position(moments):
    """The same keys, moved from the first positions to the last of 128k."""
    spec, params = fitted(moments)
    keys = moments.before.rope.turn(moments.held_k, moments.before.held_positions, back=True)
    errors = []
    offsets = torch.arange(len(keys)) % TILE
    for first in (0, 64, 4096, 32768, 131072 - TILE):
        at = offsets + first
        k = moments.before.rope.turn(keys, at).float()
        k_rot = codec.rotate(k, params.r_k)
        hat = spec.decode_k(params, spec.encode_k(params, k_rot, at), at)
        back = codec.rotate(hat, params.k_back)
        errors.append(float((back - k).square().sum() / k.square().sum()))
    assert max(errors) < 1.1 * min(errors)
    assert max(errors) < 0.02


def test_todays_codec_depends_on_it(moments):
    """What the test above would say of ``feedback``, fitted to the first 900 positions."""
    layer = fit_layer(moments, "feedback")
    spec, params = layer.codec
    keys = moments.before.rope.turn(moments.held_k, moments.before.held_positions, back=True)
    errors = []
    for first in (64, 32768):
        k = moments.before.rope.turn(keys, torch.full((len(keys),), first)).float()
        k_rot = codec.rotate(k, params.r_k)
        hat = spec.decode_k(params, spec.encode_k(params, k_rot))
        errors.append(float((hat - k_rot).square().sum() / k_rot.square().sum()))
    assert errors[1] > 1.5 * errors[0]


def test_logits_are_a_product_and_a_bias(moments):
    """What attention computes from codes, step, a and the table is q . decoded key."""
    spec, params = fitted(moments)
    k, at = moments.held_k, moments.before.held_positions
    q = normal(len(k), k.shape[1], k.shape[2]).float()
    rows = spec.encode_k(params, codec.rotate(k, params.r_k), at)
    hat = spec.decode_k(params, rows, at)
    q_rot = codec.rotate(q, params.queries)
    codes = codec.unpack(rows.packed).double()
    meta = codec_compact.decode_meta(rows.meta, params.grid[:, 0], 32).double()
    table = spec.meta.rope.table(100)[at // TILE].double()
    matrix = codec_position.mean_matrix(spec.meta.rope, params.mean)
    c = torch.einsum("thd,hed->the", q.double(), matrix)
    bias = torch.einsum("td,thd->th", table, c)
    logits = meta[..., 0] * (q_rot * (codes - 1.5)).sum(-1) + meta[..., 1] * bias
    assert torch.allclose(logits, (q_rot * hat).sum(-1).double(), atol=2e-3 * logits.std())


def test_gain_keeps_the_size_of_logits(moments):
    spec, params = fitted(moments)
    k, at = moments.held_k, moments.before.held_positions
    k_rot = codec.rotate(k, params.r_k)
    hat = spec.decode_k(params, spec.encode_k(params, k_rot, at), at)
    share = codec_position.mean_share(k_rot, at, spec.meta.rope, params)
    y, y_hat = (
        (x - share[..., None] * codec_position.mean_rot(at, spec.meta.rope, params)).double()
        for x in (k_rot, hat)
    )
    g = torch.einsum("thd,hde->the", y, params.metric.double())
    ratio = (y_hat * g).sum(-1) / (y * g).sum(-1)
    assert float((ratio - 1).abs().median()) < 0.03  # half a step of the byte, and a's rounding


@pytest.mark.parametrize("k_bits, v_bits", [(4, 2), (2, 4), (4, 4)])
def test_four_bits_are_better(moments, k_bits, v_bits):
    base, params = fitted(moments)
    ranges = replace(base.v_range, ratio=codec_position.V_RATIOS[v_bits])
    wide = replace(base, k_bits=k_bits, v_bits=v_bits, v_range=ranges)
    keys, at = moments.held_k, moments.before.held_positions
    grid = fit_position.fit_grids(wide, params, keys, at, moments.held_v)
    errors = []
    for spec, p in ((base, params), (wide, params._replace(grid=grid))):
        k_rot, v_rot = codec.rotate(keys, p.r_k), codec.rotate(moments.held_v, p.r_v)
        rows = spec.encode_k(p, k_rot, at), spec.encode_v(p, v_rot)
        assert rows[0].packed.shape[-1] == keys.shape[-1] * spec.k_bits // 8
        hats = spec.decode_k(p, rows[0], at), spec.decode_v(p, rows[1])
        errors.append(
            [float((h - x).square().sum()) for h, x in zip(hats, (k_rot, v_rot), strict=True)]
        )
    for side, bits in enumerate((k_bits, v_bits)):
        ratio = errors[1][side] / errors[0][side]
        assert ratio < 0.2 if bits == 4 else ratio == pytest.approx(1, rel=0.05)


def test_positions_are_needed(moments):
    spec, params = fitted(moments)
    with pytest.raises(ValueError, match="without their positions"):
        spec.encode_k(params, moments.held_k)
    with pytest.raises(ValueError, match="moments before RoPE"):
        fit_layer(replace(moments, before=None), "position")


def test_a_head_that_is_zero_is_coded(moments):
    silent = replace(
        moments,
        held_k=torch.zeros_like(moments.held_k),
        before=replace(
            moments.before,
            k_mean=torch.zeros_like(moments.before.k_mean),
            ktk=torch.zeros_like(moments.before.ktk),
        ),
    )
    spec, params = fitted(silent)
    k_rot = codec.rotate(silent.held_k, params.r_k)
    rows = spec.encode_k(params, k_rot, moments.before.held_positions)
    hat = spec.decode_k(params, rows, moments.before.held_positions)
    assert bool(hat.isfinite().all()) and float(hat.abs().max()) < 1e-6


def test_basis_keeps_logits_and_is_scaled(moments):
    spec, params = fitted(moments)
    eye = torch.eye(params.r_k.shape[-1]).expand_as(params.r_k)
    assert torch.allclose(params.r_k @ params.k_back, eye, atol=1e-4)
    size = params.r_k.square().sum((1, 2)) / params.r_k.shape[-1]
    assert torch.allclose(size, torch.ones_like(size), rtol=1e-4)
    assert spec.name in CODECS
