"""The CUDA form of attend and merge: compiles wherever NVRTC is, runs where a GPU is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oscar_sglang.kernels import codec, codec_lloyd, cuda_attend, cuda_store, driver, nvrtc
from oscar_sglang.kernels.cuda_args import Coding, Shape
from oscar_sglang.kernels.views import query_buffer


def form(kernel, splits, page=16, **kw):
    return cuda_attend.Form(kernel, splits, page % 16 == 0, **kw)


ARCHS = [("sm_90a", 1), ("sm_90a", 0), ("sm_80", 0)]
COMPILED = [
    *(("affine", dim, *a) for dim in (64, 128) for a in ARCHS),
    *(
        (meta, dim, *a)
        for meta in ("compact", "position", "scale", "channel")
        for dim, a in ((128, ARCHS[0]), (64, ARCHS[-1]))
    ),
]


WIDTHS = [("position", 128, *ARCHS[0], 4, 2), ("position", 64, *ARCHS[0], 4, 4)]


@pytest.mark.parametrize(
    "meta,dim,arch,paged,k_bits,v_bits", [*((*case, 2, 2) for case in COMPILED), *WIDTHS]
)
def test_compiles_without_a_toolkit(meta, dim, arch, paged, k_bits, v_bits, tmp_path, monkeypatch):
    if not nvrtc.available():
        pytest.skip("no NVRTC library in this environment (pip package nvidia-cuda-nvrtc)")
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path))
    spec = next(c for c in codec.CODECS.values() if c.meta.name == meta)
    spec = replace(spec, k_bits=k_bits, v_bits=v_bits)
    shape = Shape(spec.layout(8, dim), group=4, bf16=True, form=spec.meta.form)
    searched = meta in ("affine", "compact", "position")
    coding = Coding(k_rank=False, v_rank=True, feedback=searched, accurate=searched and not paged)
    means = meta == "position"
    kernels = [(cuda_attend.MERGE, cuda_attend.merge_defines(shape, coding, 4))]
    for kernel in ["attend_warp", *["attend_cta"] * paged]:
        defines = cuda_attend.attend_defines(form(kernel, 1, 16 * paged or 1), shape, True, means)
        kernels.append((cuda_attend.ATTEND, defines))
    if meta != "channel":
        kernels.append((cuda_store.SOURCE, cuda_store.defines_of(shape, coding)))
    for source, defines in kernels:
        built = source.text(), arch, dict(defines), source.name
        first = nvrtc.compile_cubin(*built)
        monkeypatch.setattr(nvrtc, "_compile", None)  # the second time comes from disk
        assert nvrtc.compile_cubin(*built) == first
        assert list((tmp_path / "kernels").glob(f"{Path(source.name).stem}-*.cubin"))
        monkeypatch.undo()
        monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path))


def test_compile_errors_show_the_log():
    if not nvrtc.available():
        pytest.skip("no NVRTC library in this environment (pip package nvidia-cuda-nvrtc)")
    with pytest.raises(nvrtc.CompileError, match="not_a_type"):
        nvrtc.compile_cubin("not_a_type x;", "sm_90a", {}, "broken.cu")


def test_levels_come_from_one_multiply_add():
    """What meta.cu does to codes of ``lloyd``, in every bit plane; numpy rounds as a GPU does."""
    least, codes = 2.0**-24, np.arange(4)
    for plane in range(5):
        ratio = np.array(0x46AB - 0x0800 * plane, dtype=np.uint16).view(np.float16)
        operands = (codes << (2 * plane)).astype(np.uint16).view(np.float16)
        exact = operands.astype(np.float64) * float(ratio) - 10 * least
        assert (exact.astype(np.float16) / np.float16(least)).tolist() == [-10, -3, 3, 10]
    off = 0.151057 * np.array([-10, -3, 3, 10]) - np.array(codec_lloyd.LEVEL_VALUES)
    assert abs(off).max() < 3e-4


gpu = pytest.mark.gpu
LENS = [(1,), (15, 16, 17, 319, 320, 321), (63, 64, 65, 0, 400), (3000, 1, 1040)]


@gpu
@pytest.mark.parametrize(
    "kernel,splits", [("attend_cta", 7), ("attend_cta", 264), ("attend_warp", 66)]
)
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_lengths(lab, check, kernel, splits, lens):
    x = lab(lens=lens, kv_heads=8, group=4, dim=128, n_sink=64, n_recent=256)
    x.fill(lens)
    check(x, list(lens), form=form(kernel, splits), tol=3e-3)


@gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(lab, check, page, dim):
    x = lab(lens=(700, 333), page=page, dim=dim, kv_heads=4, n_sink=21, n_recent=50)
    x.fill((700, 333))
    check(x, [700, 333], form=form("attend_warp", 9, page), tol=3e-3)


@gpu
@pytest.mark.parametrize(
    "kv_heads,group,dim", [(1, 16, 128), (2, 1, 128), (3, 5, 64), (4, 8, 128), (16, 2, 64)]
)
def test_shapes(lab, check, kv_heads, group, dim):
    x = lab(lens=(500, 90), kv_heads=kv_heads, group=group, dim=dim)
    x.fill((500, 90))
    kernels = ["attend_warp"] + (["attend_cta"] if kv_heads % 8 == 0 else [])
    for kernel in kernels:
        check(x, [500, 90], form=form(kernel, 20), tol=3e-3)


@gpu
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
def test_several_query_tokens(lab, check, kernel):
    lens, q_lens = (800, 20, 4, 300), [16, 1, 4, 7]
    x = lab(lens=lens, group=3, kv_heads=8, dim=128)
    x.fill(lens)
    check(x, list(lens), q_lens=q_lens, form=form(kernel, 30), tol=3e-3)


@gpu
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_soft_cap_and_dtypes(lab, check, kernel, dtype):
    x = lab(lens=(600,), kv_heads=8, group=4, dim=64, dtype=dtype)
    x.fill((600,))
    check(x, [600], cap=3.0, spread=3.0, form=form(kernel, 11), tol=3e-3)


@gpu
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
@pytest.mark.parametrize("spread,q_spread", [(2000.0, 1e-3), (1e-5, 1e2), (4.0, 4.0)])
def test_ranges(lab, check, kernel, spread, q_spread):
    """Steps beyond FP16's safe product, tiny values, peaked soft-max."""
    x = lab(lens=(900,), kv_heads=8, group=4, dim=128, spread=spread)
    x.fill((900,))
    check(x, [900], spread=q_spread, form=form(kernel, 11), tol=4e-3)


CODECS = ["compact", "position", "lloyd"]  # those whose metadata are not FP16 step and lo


@gpu
@pytest.mark.parametrize("codec_name", [*CODECS, "accurate", "accurate-compact", "oscar"])
@pytest.mark.parametrize("dim", [64, 128])
def test_codecs(lab, check, codec_name, dim):
    """Both forms, pages of every kind, first and last tiles cut by the sink and by the ring."""
    lens = (700, 333, 21, 64)
    for page, kernels in ((1, ["attend_warp"]), (64, ["attend_warp", "attend_cta"])):
        x = lab(
            lens=lens, page=page, dim=dim, kv_heads=8, n_sink=21, n_recent=50, codec_name=codec_name
        )
        x.fill(lens)
        for kernel in kernels:
            check(x, list(lens), form=form(kernel, 19, page), tol=3e-3)


@gpu
@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
@pytest.mark.parametrize("spread,q_spread", [(2000.0, 1e-3), (1e-4, 1e2), (4.0, 4.0)])
def test_ranges_of_codecs(lab, check, codec_name, kernel, spread, q_spread):
    """As ``test_ranges``; compact saturates at the ends of its grid, where steps reach 200, and
    lloyd's integer levels are off by 2.6e-4 (RMS)."""
    x = lab(lens=(900,), kv_heads=8, group=4, dim=128, spread=spread, codec_name=codec_name)
    x.fill((900,))
    logit_tol = 4e-4 if codec_name == "lloyd" else 1e-4
    check(x, [900], spread=q_spread, form=form(kernel, 11), tol=4e-3, logit_tol=logit_tol)


@gpu
@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
def test_several_queries_and_soft_cap_of_codecs(lab, check, codec_name, kernel):
    lens, q_lens = (800, 20, 4, 300), [16, 1, 4, 7]
    x = lab(lens=lens, group=3, kv_heads=8, dim=128, codec_name=codec_name, dtype=torch.float16)
    x.fill(lens)
    check(x, list(lens), q_lens=q_lens, cap=3.0, spread=2.0, form=form(kernel, 30), tol=3e-3)


# Contexts whose history ends at a page, with and without history.
OMNI_LENS = (640, 384, 1280, 200, 30)


@gpu
@pytest.mark.parametrize(
    "kernel,splits", [("attend_cta", 7), ("attend_cta", 264), ("attend_warp", 19)]
)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("n_sink", [21, 64])
def test_channel_metadata(lab, check, kernel, splits, dim, n_sink):
    x = lab(
        lens=OMNI_LENS, dim=dim, kv_heads=8, group=4, n_sink=n_sink, n_recent=256, codec_name="omni"
    )
    x.fill(OMNI_LENS)
    check(x, list(OMNI_LENS), form=form(kernel, splits, x.page), tol=3e-3)
    unpaged = cuda_attend.Form("attend_warp", splits, False)
    check(x, list(OMNI_LENS), cap=3.0, spread=2.0, form=unpaged, tol=3e-3)


@gpu
@pytest.mark.parametrize("kernel", ["attend_cta", "attend_warp"])
@pytest.mark.parametrize(
    "spread,q_spread,outliers",
    [(2000.0, 1e-3, False), (1e-4, 1e2, False), (4.0, 4.0, False), (1.0, 0.02, True)],
)
def test_ranges_of_channel_metadata(lab, check, kernel, spread, q_spread, outliers):
    """Outliers: a page with a few huge steps and otherwise none, and one without any."""
    lens = (640, 1024)
    x = lab(
        lens=lens, kv_heads=8, group=3, dim=128, n_sink=64, n_recent=256, spread=spread,
        codec_name="omni",
    )  # fmt: skip
    x.fill(lens)
    if outliers:
        pages = (x.req_to_token[2, [128, 256]] // 128).tolist()
        x.seg.history.channels[0][pages, :, :, 0] = 0.0
        x.seg.history.channels[0][pages[0], :, :5, 0] = 1000.0
    options = dict(form=form(kernel, 11, 128), tol=4e-3, logit_tol=4e-4)
    check(x, list(lens), q_lens=[5, 1], spread=q_spread, **options)


@gpu
def test_addresses_beyond_32_bits(lab, check):
    blocks = 2**32 // (8 * 1152) + 5  # byte offsets pass 2^32, 16-bit offsets 2^31
    x = lab(
        lens=(200,), kv_heads=8, group=4, dim=128, first_slot_block=blocks, n_sink=64, n_recent=64
    )
    x.fill((200,))
    for f in (None, form("attend_cta", 9), form("attend_warp", 9)):
        check(x, [200], form=f, tol=3e-3)


@gpu
def test_one_graph_serves_changing_lengths(lab, rms):
    from oscar_sglang.kernels.decode import DecodeAttention

    lens = (900, 500, 77, 1)
    x = lab(lens=lens, kv_heads=8, group=4, dim=128)
    x.fill(lens)
    scale = 128**-0.5
    attention = DecodeAttention(
        heads=32, kv_heads=8, head_dim=128, dtype=x.dtype, windows=x.windows, page_size=16,
        max_batch=4, device=x.device,
    )  # fmt: skip
    assert attention.cuda
    step = attention.step(4)
    q = torch.randn(4, 32, 128, device=x.device)
    out = torch.empty(4, 32, 128, device=x.device, dtype=x.dtype)
    seq, rotated = torch.tensor(lens, device=x.device), torch.empty_like(q)

    def forward():
        step.plan(x.rows, seq, x.seg.windows.recent_start)
        rotated.copy_(q)
        step(x.view(), rotated, x.req_to_token, out, scale=scale)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for lengths in (lens, (1, 500, 0, 1), (900, 3, 77, 1)):
        # A request may only be read at the length its ring holds, or shorter than the sink.
        seq.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        for b, s in enumerate(lengths):
            if s:
                assert rms(out[b], x.attention(b, q[b : b + 1], s, scale)[0][0]) < 4e-3
            else:
                assert (out[b] == 0).all()


class Layers:
    """Layers of a decode step on one cache, all of which write and read the same rows."""

    def __init__(self, lab, batch, codec_name, layers=4):
        from oscar_sglang.kernels.decode import DecodeAttention
        from oscar_sglang.kernels.views import TokenBatch

        lens = [700 + 13 * b for b in range(batch)]
        self.lab = x = lab(
            lens=lens, kv_heads=8, group=4, dim=128, n_sink=64, n_recent=256, codec_name=codec_name
        )
        x.fill(lens)
        self.step = DecodeAttention(
            heads=32, kv_heads=8, head_dim=128, dtype=x.dtype, windows=x.windows, page_size=x.page,
            max_batch=batch, device=x.device, block=x.block,
        ).step(batch)  # fmt: skip
        self.last = last = torch.tensor(lens, device=x.device)
        slots = x.req_to_token[x.rows, last].long()
        self.where = TokenBatch(x.rows, last, last + 1, slots, torch.full_like(slots, -1))
        self.inputs = [[x.random(batch, n) for n in (32, 8, 8)] for _ in range(layers)]
        self.outs = torch.empty(layers, batch, 32, 128, device=x.device, dtype=x.dtype)
        self.q_rot = query_buffer(x.view(), batch, 32)
        self.view, self.options = x.view(), dict(scale=128**-0.5)

    def refresh(self):
        for tensors in self.inputs:
            for t in tensors:
                t.normal_()

    def overlapping(self):
        """As they are served: codes beside merge, where tokens are few."""
        x = self.lab
        self.step.plan(x.rows, self.last + 1, x.seg.windows.recent_start)
        for qkv, out in zip(self.inputs, self.outs, strict=True):
            self.step.layer(self.view, self.where, *qkv, x.req_to_token, out, **self.options)

    def one_by_one(self):
        """store, attend and merge; after ``overlapping``, whose plan it takes."""
        from oscar_sglang.kernels.store import store

        for qkv, out in zip(self.inputs, self.outs, strict=True):
            store(self.view, self.where, *qkv, self.q_rot)
            self.step(self.view, self.q_rot, self.lab.req_to_token, out, **self.options)

    def graph(self):
        self.overlapping()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.overlapping()
        return graph

    def result(self, run):
        """What ``run`` leaves: outputs, and the history's bytes."""
        self.outs.fill_(float("nan"))
        run()
        return self.outs.clone(), self.lab.seg.history.blocks[0].clone()


@gpu
@pytest.mark.parametrize(
    "batch,codec_name",
    [
        *((batch, "feedback") for batch in (1, 3, 40)),
        *((3, n) for n in ("compact", "position", "lloyd", "accurate", "accurate-compact")),
    ],
)
def test_codes_written_beside_merge(lab, batch, codec_name):
    """Layers replayed as one graph: bit-equal to store, attend and merge one after another."""
    layers = Layers(lab, batch, codec_name)
    graph = layers.graph()
    for _ in range(20):
        layers.refresh()
        out, blocks = layers.result(graph.replay)
        expected = layers.result(layers.one_by_one)
        assert not out.isnan().any()
        assert torch.equal(out, expected[0]) and torch.equal(blocks, expected[1])


@gpu
@pytest.mark.parametrize(
    "batch,codec_name",
    [
        *((batch, "feedback") for batch in (1, 24, 40)),
        *((8, name) for name in ("compact", "position", "lloyd", "omni")),
    ],
)
def test_overlap_changes_nothing(lab, monkeypatch, batch, codec_name):
    """Kernels that start while the last one still runs, thousands of times over: bit-equal to
    kernels that do not. Races show here, at a rate of one replay in a few hundred."""
    launch = driver.Kernel.__call__

    def alone(self, *args):
        overlap, self._overlap = self._overlap, False
        launch(self, *args)
        self._overlap = overlap

    layers = Layers(lab, batch, codec_name)
    graph = layers.graph()
    for _ in range(10):
        layers.refresh()
        with monkeypatch.context() as patch:
            patch.setattr(driver.Kernel, "__call__", alone)
            expected, _ = layers.result(layers.one_by_one)
        differing = torch.zeros((), dtype=torch.int64, device=expected.device)
        for _ in range(200):
            layers.outs.fill_(float("nan"))
            graph.replay()
            differing += (layers.outs != expected).any()
        assert differing == 0
