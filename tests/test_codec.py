import numpy as np
import pytest
import torch

from oscar_sglang.kernels import codec
from oscar_sglang.kernels.codec import CODECS, LayerParams, RangeRule
from oscar_sglang.kernels.codec_lloyd import LEVEL_VALUES
from oscar_sglang.kernels.codec_position import Rope
from tests.support import vectors

SHRINK = RangeRule("shrink", 0.75)
ROW_CODECS = [name for name, spec in CODECS.items() if spec.block == 1]  # others: test_blocks.py


def f32(x):
    return torch.tensor(x, dtype=torch.float32)


def layer_spec(name, d=64):
    """The codec as a layer with RoPE has it."""
    spec = CODECS[name]
    if spec.meta.name != "position":
        return spec
    return codec.with_rope(spec, Rope.of([10000 ** (-2 * i / d) for i in range(d // 2)], d))


def random_params(d, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = [torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0] for _ in "kv"]
    factor = (torch.randn(heads, d, d, generator=g) * 0.02).triu(1)
    metric = torch.randn(heads, d, d, generator=g)
    metric = metric @ metric.mT / d + torch.eye(d)
    grid = torch.tensor([[-8.0, -6.0, 12 / 255]] * 2).repeat(heads, 1, 1)
    r_k, r_v = (r.float().expand(heads, d, d).contiguous() for r in q)
    mean = torch.randn(heads, d, generator=g)
    return LayerParams(r_k, r_v, factor, metric, grid, r_k, mean)


def used(params, spec):
    """``params`` with the tensors that ``spec`` names and no other."""
    names = spec.tensors(params.r_k.shape[-1])
    return LayerParams(**{n: getattr(params, n) for n in names})


@pytest.mark.parametrize("d", [64, 128])
def test_vector_files_are_met_code_for_code(d):
    vec = vectors.load(d)
    assert np.allclose(vec.k[0, :4], vec.expected["k_row0"])
    k_rot = codec.rotate(f32(vec.k)[:, None], f32(vec.rotation)[None])
    meta = codec.value_range(k_rot, SHRINK)
    assert meta[:, 0, 0].tolist() == vec.expected["scale_fp16"]
    assert meta[:, 0, 1].tolist() == vec.expected["lo_fp16"]
    plain = codec.round_codes(k_rot, meta)[:, 0].numpy()
    assert np.array_equal(plain, vectors.codes(vec.expected["packed_plain"]))
    factor = f32(vectors.feedback_factor(vec.metric))[None]
    fed = codec.feedback_codes(k_rot, meta, factor)[:, 0].numpy()
    assert np.array_equal(fed, vectors.codes(vec.expected["packed_feedback"]))

    def metric_error(c):
        e = codec.decode(torch.from_numpy(c)[:, None], meta)[:, 0].double().numpy()
        y = k_rot[:, 0].double().numpy()
        return np.einsum("ti,ij,tj->", e - y, vec.metric, e - y) / np.einsum(
            "ti,ij,tj->", y, vec.metric, y
        )

    assert metric_error(plain) == pytest.approx(vec.expected["rel_metric_err_plain"], rel=1e-4)
    assert metric_error(fed) == pytest.approx(vec.expected["rel_metric_err_feedback"], rel=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_pack_round_trip_and_channel_order(d, bits):
    codes = torch.randint(0, 2**bits, (3, 2, d), dtype=torch.uint8)
    packed = codec.pack(codes, bits)
    assert packed.shape == (3, 2, d * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(codec.unpack(packed, bits).to(torch.uint8), codes)
    halves = packed.view(torch.int16).int() & 0xFFFF
    n = d * bits // 16
    for i in range(n):
        for j in range(16 // bits):
            found = (halves[..., i] >> bits * j) & (2**bits - 1)
            assert torch.equal(found.byte(), codes[..., i + n * j])


@pytest.mark.parametrize("name", ROW_CODECS)
def test_a_rows_codes_do_not_depend_on_its_batch(name):
    spec = layer_spec(name)
    params = used(random_params(64), spec)
    x, at = torch.randn(97, 2, 64) + torch.randn(64), torch.arange(1000, 1097)
    whole = spec.encode_k(params, codec.rotate(x, params.r_k), at)
    for start, end in ((0, 1), (40, 57), (96, 97)):
        part = x[start:end]
        rows = spec.encode_k(params, codec.rotate(part, params.r_k), at[start:end])
        assert torch.equal(rows.packed, whole.packed[start : start + len(part)])
        assert torch.equal(rows.meta, whole.meta[start : start + len(part)])


def test_decode_encode_is_idempotent():
    """Re-encoding decoded rows with the same metadata finds the same codes."""
    y = torch.randn(50, 2, 64)
    meta = codec.value_range(y, SHRINK)
    codes = codec.round_codes(y, meta)
    again = codec.round_codes(codec.decode(codes, meta), meta)
    assert torch.equal(codes, again)
    # An exactly representable row has no error to feed back.
    fed = codec.feedback_codes(codec.decode(codes, meta), meta, random_params(64).factor)
    assert torch.equal(codes, fed)


@pytest.mark.parametrize("name", ROW_CODECS)
def test_rows_hold_what_the_layout_says(name):
    """Bytes of an encoded row; values are at most half a step (or level gap) off, V's rounded."""
    spec = layer_spec(name)
    params, y = used(random_params(64), spec), torch.randn(200, 2, 64)
    layout = spec.layout(2, 64)
    rows = spec.encode_k(params, y, torch.arange(200)), spec.encode_v(params, y)
    assert sum(t[0].numel() * t.element_size() for r in rows for t in r) == layout.bytes_per_slot
    assert [r.meta.shape[-1] for r in rows] == [layout.k_meta, layout.v_meta]
    hat = spec.decode_v(params, rows[1])
    scale = rows[1].meta.float()
    if spec.meta.name == "scale":
        gap = (LEVEL_VALUES[3] - LEVEL_VALUES[2]) * scale
    else:
        step = codec.value_range(y, spec.v_range).float()[..., :1]
        gap = step * (2 ** (0.5 / spec.meta.per_octave) if params.grid is not None else 1)
    inside = (y >= hat.amin(-1, keepdim=True)) & (y <= hat.amax(-1, keepdim=True))
    assert bool(((hat - y).abs() <= 0.5001 * gap)[inside].all()) and inside.float().mean() > 0.6


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.meta.name == "compact"])
def test_compact_differs_from_its_parent_by_metadata_only(name):
    """With a grid so fine that it hardly rounds, codes are those of 16-bit metadata."""
    spec, parent = CODECS[name], CODECS[name.removesuffix("compact").rstrip("-") or "feedback"]
    assert spec.search == parent.search and spec.k_range == parent.k_range
    params, y = random_params(64), torch.randn(100, 2, 64)
    y = y / codec.value_range(y, spec.v_range)[..., :1].float()  # steps 1, at the grid's 2^0
    rows = spec.encode_v(params, y)
    want = parent.encode_v(used(params, parent), y)
    assert bool((rows.meta[..., 0] == 128).all())
    assert (codec.unpack(rows.packed) == codec.unpack(want.packed)).float().mean() > 0.98


HOSTILE = {
    "zero": torch.zeros(64),
    "constant": torch.full((64,), 3.25),
    "one-hot": torch.eye(64)[7] * 100,
    "fp16-max": torch.full((64,), 65504.0) * torch.tensor([1.0, -1.0]).repeat(32),
    "bf16-large": torch.full((64,), 1e30),
    "denormal": torch.full((64,), 1e-40),
    "tiny-spread": 5 + torch.arange(64) * 1e-7,
}


@pytest.mark.parametrize("name", ROW_CODECS)
@pytest.mark.parametrize("row", HOSTILE)
def test_hostile_rows_stay_finite(name, row):
    spec, at = layer_spec(name), torch.tensor([70])
    params = used(random_params(64, heads=1), spec)
    x = HOSTILE[row].view(1, 1, 64)
    k = spec.encode_k(params, codec.rotate(x, params.r_k), at)
    v = spec.encode_v(params, codec.rotate(x, params.r_v))
    assert torch.isfinite(spec.decode_k(params, k, at)).all()
    assert torch.isfinite(spec.decode_v(params, v)).all()


@pytest.mark.parametrize("rule", [SHRINK, RangeRule("shrink", 1.0), RangeRule("rank", 0.96)])
def test_constant_rows_come_back(rule):
    y = torch.tensor([0.0, 3.25, -7.5, 1000.0]).view(4, 1, 1).expand(4, 1, 64).contiguous()
    meta = codec.value_range(y, rule)
    decoded = codec.decode(codec.round_codes(y, meta), meta)
    assert torch.allclose(decoded, y, rtol=2**-9, atol=0)


def test_rank_rule_clips_at_the_stated_element():
    y = torch.arange(1.0, 65.0).view(1, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    meta = codec.value_range(y, RangeRule("rank", 0.92)).float()
    tau = 1.0 + int(0.92 * 64)  # |y| of that rank from below
    assert meta[0, 1] == -tau and meta[0, 0] == pytest.approx(2 * tau / 3, rel=1e-3)


def test_rotate_keeps_logits_and_groups_query_heads():
    params = random_params(64)
    q, k = torch.randn(5, 6, 64), torch.randn(5, 2, 64)
    q_rot, k_rot = codec.rotate(q, params.r_k), codec.rotate(k, params.r_k)
    for head in range(6):
        exact = (q[:, head] * k[:, head // 3]).sum(-1)
        assert torch.allclose((q_rot[:, head] * k_rot[:, head // 3]).sum(-1), exact, atol=1e-4)
