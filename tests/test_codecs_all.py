"""Every method behind the one interface: bytes, round trips, edge rows, blocks, names."""

import pytest
import torch

from oscar_sglang.calibration import CalibrationError
from oscar_sglang.calibration.baselines.bits import pack_bits, unpack_bits
from oscar_sglang.calibration.collect import collect, load_model
from oscar_sglang.calibration.fit import DAMPING, fit_layer
from oscar_sglang.calibration.fit_options import feedback_metric
from oscar_sglang.calibration.method import block_pieces
from oscar_sglang.calibration.methods import METHODS, PUBLISHED_WINDOWS, parse_jobs, sweep_jobs
from oscar_sglang.kernels import codec, codec_accurate, codec_compact, codec_lloyd, codec_omni
from scripts.lib.tiny_models import qwen3, random_ids

D = 128
BITS = {  # K and V together, head_dim 128, whole blocks
    "fp8": 8,
    "int4-hadamard": 4.25,
    "turboquant-3": 3.125,
    "turboquant-2.5": 2.625,
    "turboquant-2": 2.125,
    "naive": 2.25,
    "quarot": 2.25,
    "kivi": 2.25,
    "kivi-g32": (3 + 2.25) / 2,
    "kitty": (2.5 + 2.25) / 2,
    "oscar": 2.25,
    "oscar-proxy": 2.25,
    "lloyd": 2.125,
    "omni": (2.25 + 0.125 + 2.25) / 2,
    "aligned": 2.25,
    "feedback": 2.25,
    "accurate": 2.25,
    "compact": 2.125,
    "accurate-compact": 2.125,
    "position": 2.125,
}


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    model = load_model(qwen3(tmp_path_factory.mktemp("model")), "cpu")
    return collect(model, random_ids(900), n_sink=8)[1]


@pytest.fixture(scope="module")
def fitted(moments):
    return {name: m.fit(moments if m.needs_stats else None) for name, m in METHODS.items()}


def rows(n: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, D, generator=g) + 1, torch.randn(n, 2, D, generator=g)


def round_trip(name, fitted, k, v, first=0):
    method = METHODS[name]
    return method.decode(fitted[name], method.encode(fitted[name], k, v, first))


@pytest.mark.parametrize("name", METHODS)
def test_bits_are_those_of_the_stored_bytes(name, fitted):
    k, v = rows()
    encoded = METHODS[name].encode(fitted[name], k, v)
    assert encoded.bits(2 * k.numel()) == pytest.approx(BITS[name])


@pytest.mark.parametrize("name", METHODS)
def test_reconstruction_is_sensible(name, fitted, moments):
    """Correlated with the truth, float32, in the model's basis."""
    k, v = moments.held_k, moments.held_v
    for x, hat in zip((k, v), round_trip(name, fitted, k, v), strict=True):
        assert hat.shape == x.shape and hat.dtype == torch.float32
        cosine = torch.cosine_similarity(x.flatten(), hat.flatten(), dim=0)
        assert cosine > (0.99 if BITS[name] > 4 else 0.8)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["zero", "constant", "huge", "denormal"])
def test_edge_rows_stay_finite(name, kind, fitted):
    value = {"zero": 0.0, "constant": 3.0, "huge": 65504.0, "denormal": 1e-40}[kind]
    x = torch.full((128, 2, D), value)
    for hat in round_trip(name, fitted, x, x):
        assert bool(hat.isfinite().all())
        if kind == "zero":
            assert float(hat.abs().max()) < 1e-3 or BITS[name] == 2.125  # coarse steps


@pytest.mark.parametrize("name", METHODS)
def test_codes_do_not_depend_on_how_rows_are_cut(name, fitted):
    k, v = rows(256)
    method = METHODS[name]
    size = max(method.block, 64)
    whole = round_trip(name, fitted, k, v)
    pieces = [
        round_trip(name, fitted, k[i : i + size], v[i : i + size], first=i)
        for i in range(0, 256, size)
    ]
    for hat, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert torch.equal(hat, torch.cat(parts))


def test_more_bits_are_better(fitted):
    k, v = rows()
    errors = {}
    for name in ("fp8", "int4-hadamard", "turboquant-3", "turboquant-2.5", "turboquant-2"):
        k_hat, v_hat = round_trip(name, fitted, k, v)
        errors[name] = float((k_hat - k).square().sum() + (v_hat - v).square().sum())
    assert list(errors.values()) == sorted(errors.values())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_bit_planes_round_trip(bits):
    codes = torch.randint(2**bits, (5, 3, 24), generator=torch.Generator().manual_seed(bits))
    packed = pack_bits(codes, bits)
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack_bits(packed), codes.int())


@pytest.mark.parametrize(
    "first, length, pieces",
    [
        (0, 256, [(0, 128), (128, 256)]),
        (64, 320, [(0, 64), (64, 192), (192, 320)]),
        (64, 40, [(0, 40)]),
        (128, 128, [(0, 128)]),
        (0, 0, []),
    ],
)
def test_block_pieces(first, length, pieces):
    assert [(s.start, s.stop) for s in block_pieces(first, length, 128)] == pieces


# ---- accurate, compact, lloyd, omni


def test_accurate_has_the_smaller_metric_error(moments):
    params = fit_layer(moments, "feedback").params
    metric = feedback_metric(params.r_k, moments.qtq, DAMPING).float()
    y = codec.rotate(moments.held_k, params.r_k)
    meta = codec.value_range(y, codec.CODECS["feedback"].k_range)

    def error(codes, meta):
        found = codec_accurate.metric_energy(y - codec.decode(codes, meta), metric)
        return float(found.sum())

    plain = error(codec.round_codes(y, meta), meta)
    greedy = codec.feedback_codes(y, meta, params.factor)
    swept = codec_accurate.sweep(y, greedy, meta, metric)
    accurate = codec_accurate.encode(y, params.factor, metric, lambda m: m.half().float())
    assert error(swept, meta) < error(greedy, meta) < plain
    assert error(*accurate) < error(greedy, meta)


def test_accurate_restores_the_energy_of_keys(moments):
    params = fit_layer(moments, "feedback").params
    metric = feedback_metric(params.r_k, moments.qtq, DAMPING).float()
    y = codec.rotate(moments.held_k, params.r_k)
    codes, meta = codec_accurate.encode(y, params.factor, metric, lambda m: m)
    low, high = y.aminmax(dim=-1, keepdim=True)
    centre = (low + high) / 2
    energies = [
        codec_accurate.metric_energy(x - centre, metric) for x in (y, codec.decode(codes, meta))
    ]
    assert torch.allclose(*energies, rtol=1e-3)


def test_compact_metadata_is_within_half_a_step():
    grid = torch.tensor([-10.0, -3.0, 6 / 255]).repeat(2, 1)
    g = torch.Generator().manual_seed(0)
    step = torch.exp2(12 * torch.rand(50, 2, generator=g) - 8)
    meta = torch.stack([step, 6 * torch.rand(50, 2, generator=g) - 3], -1)
    stored = codec_compact.encode_meta(meta, grid)
    found = codec_compact.decode_meta(stored, grid)
    assert stored.dtype == torch.uint8
    assert float((found[..., 0] / meta[..., 0]).log2().abs().max()) <= 1 / 32 + 1e-5
    assert float((found[..., 1] - meta[..., 1]).abs().max()) <= 3 / 255 + 1e-5
    assert torch.equal(codec_compact.encode_meta(found, grid), stored)


def test_lloyd_levels_are_the_optimum_for_a_gaussian():
    x = torch.randn(1, 1 << 16, generator=torch.Generator().manual_seed(0))
    rows = codec_lloyd.encode(x)
    levels = codec_lloyd.decode(rows) / rows.meta.float()
    for level in codec_lloyd.LEVEL_VALUES:
        cell = x[torch.isclose(levels, torch.tensor(level))] / rows.meta.float()
        assert float(cell.mean()) == pytest.approx(level, abs=0.02)


def test_omni_keys_are_per_channel_after_the_token_norm():
    y = rows(codec_omni.BLOCK)[0] * torch.linspace(0.1, 10, codec_omni.BLOCK)[:, None, None]
    block = codec_omni.encode_k(y)
    unit = y / block.norm.float()[..., None]
    step, lo = block.meta.float().unbind(-1)
    assert torch.allclose(lo, unit.amin(0), atol=1e-3)
    assert torch.allclose(lo + 3 * step, unit.amax(0), atol=3e-3)
    error = (codec_omni.decode_k(block) / block.norm.float()[..., None] - unit).abs()
    assert bool((error <= step / 2 + 3e-3).all())


def test_heads_with_their_own_outliers_need_their_own_rotation(moments):
    """Two heads whose keys have large means along orthogonal axes: OSCAR issue 16."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(512, 2, D, generator=g)
    k[:, 0, 3] += 120
    k[:, 1, 77] += 120
    mean = k.mean(0).double()
    ktk = torch.einsum("nhd,nhe->hde", k.double(), k.double()) / len(k)
    eye = torch.eye(D, dtype=torch.float64).expand(2, D, D)
    own = type(moments)(**(vars(moments) | dict(k_mean=mean, ktk=ktk, qtq=eye, held_k=k)))
    shared_mean = mean.mean(0, keepdim=True).expand(2, D)
    shared = type(moments)(**(vars(own) | dict(k_mean=shared_mean)))
    errors = []
    for m in (own, shared):
        params = fit_layer(m, "aligned").params
        k_rot = codec.rotate(k, params.r_k)
        spec = codec.CODECS["aligned"]
        hat = spec.decode_k(params, spec.encode_k(params, k_rot))
        errors.append(float((hat - k_rot).square().mean()))
    assert errors[1] > 5 * errors[0]


# ---- names


def test_job_names():
    jobs = parse_jobs("feedback, omni@0+128,feedback", 64, 256)
    assert [(j.label, j.n_sink, j.n_recent) for j in jobs] == [
        ("feedback", 64, 256),
        ("omni@0+128", 0, 128),
    ]
    assert len(parse_jobs("all", 64, 256)) == len(METHODS) + len(PUBLISHED_WINDOWS)


@pytest.mark.parametrize("text", ["nope", "", "omni@", "omni@1", "omni@a+b", "omni@-1+3"])
def test_bad_job_names_are_refused(text):
    with pytest.raises(CalibrationError, match="--codecs"):
        parse_jobs(text, 64, 256)


def test_sweep_varies_one_window_at_a_time():
    jobs = sweep_jobs(parse_jobs("feedback", 64, 256))
    assert jobs[0].label == "feedback" and not jobs[0].swept
    assert all(j.swept for j in jobs[1:])
    assert {j.n_sink for j in jobs if j.n_recent == 256} == {0, 4, 16, 64, 128}
    assert {j.n_recent for j in jobs if j.n_sink == 64} == {64, 128, 256, 512}
