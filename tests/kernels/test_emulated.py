"""The CUDA kernels without a GPU (``emulated.py``): every form of attend, merge, store and rotate,
every codec. Not what only a GPU has: races, the tensor cores' own rounding, BF16, the overlap of
kernels.

Tolerances: attend 2e-3 relative RMS (FP16 operands and output; ``lloyd``'s integer levels 3e-4);
store the same bytes but for rows at a tie of float32 rounding.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscar_sglang.health.selftest import check_served
from oscar_sglang.kernels import codec, cuda_attend, cuda_store
from oscar_sglang.kernels.attend import Partials
from oscar_sglang.kernels.cuda_args import Shape
from oscar_sglang.kernels.decode import DecodeAttention
from oscar_sglang.kernels.driver import Source
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.plan import plan_attend
from oscar_sglang.kernels.views import prepare_queries, query_buffer
from tests.support.emulated import EMULATOR, SOURCES

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without a GPU only: one runs the kernels themselves"
)

WARP = dict(kernel="attend_warp", splits=5, warps=2, stages=3)
UNPAGED = cuda_attend.Form(paged=False, **WARP)
PAGED = cuda_attend.Form(paged=True, **WARP)
CTA = cuda_attend.Form("attend_cta", 5, True)
# name of a codec and a remark -> form, shape of the cache
CASES = {
    "feedback": (UNPAGED, dict(dim=128, page=1)),
    "feedback-paged": (PAGED, dict(dim=64)),
    "feedback-cta": (CTA, dict(dim=64, kv_heads=8)),
    "feedback-huge": (PAGED, dict(dim=64, spread=2000.0)),
    "compact": (UNPAGED, dict(dim=64, page=1)),
    "compact-paged": (PAGED, dict(dim=128)),
    "lloyd": (PAGED, dict(dim=64)),
    "lloyd-huge": (UNPAGED, dict(dim=64, spread=2000.0)),
    "lloyd-cta": (CTA, dict(dim=128, kv_heads=8)),
    # More splits than merge has warps.
    "lloyd-long": (replace(PAGED, splits=12), dict(dim=64, kv_heads=1)),
    "position": (UNPAGED, dict(dim=64, page=1)),
    "position-neighbours": (CTA, dict(dim=128, kv_heads=8, adjacent=True)),
    "position42": (PAGED, dict(dim=128)),
    "position24": (UNPAGED, dict(dim=64, page=1)),
    "position42-cta": (CTA, dict(dim=64, kv_heads=8)),
    "position44-cta": (CTA, dict(dim=128, kv_heads=8)),
    # More tiles than biases are computed for together.
    "position-long": (replace(PAGED, splits=1), dict(dim=64, kv_heads=1)),
    "position-cta-long": (replace(CTA, splits=1), dict(dim=64, kv_heads=8, group=1)),
    "position-huge": (PAGED, dict(dim=64, spread=2000.0)),
    "omni": (UNPAGED, dict(dim=64)),
    "omni-paged": (PAGED, dict(dim=128)),
    "omni-cta": (CTA, dict(dim=64, kv_heads=8)),
}


@pytest.mark.parametrize("case", CASES)
def test_attend(lab, cuda, check, case):
    """Ragged lengths and queries: windows alone, history, a ring that wraps, splits in between."""
    form, changes = CASES[case]
    name = case.partition("-")[0]
    block = 128 if name == "omni" else 1
    lens, q_lens = ([300, 20, 180], [1, 3, 2]) if block == 1 else ([3 * block + 50, 20], [1, 3])
    if case.endswith("long"):
        lens, q_lens = [2300 if form.splits > 1 else 700], [2]
    shape = dict(kv_heads=2, group=4, n_sink=21, n_recent=40, dtype=torch.float16)
    x = lab(lens=lens, codec_name=name, **(shape | changes))
    x.fill(lens)
    for spread in (1e-3, 3e-3) if case.endswith("huge") else (1.0, 4.0):
        check(x, lens, q_lens=q_lens, form=form, spread=spread)


def test_soft_cap_and_no_context(lab, cuda, check):
    x = lab(lens=(200, 0), codec_name="compact", kv_heads=1, group=2, dtype=torch.float16)
    x.fill((200, 0))
    check(x, [200, 0], q_lens=[2, 1], cap=3.0, spread=3.0, form=UNPAGED)


STORED = [
    ("feedback", 128), ("feedback", 64), ("oscar", 64), ("lloyd", 128), ("compact", 64),
    ("accurate", 64), ("accurate-compact", 128), ("position", 64), ("position", 128),
    ("position42", 64), ("position44", 128),
]  # fmt: skip


@pytest.mark.parametrize("name, dim", STORED)
def test_store(lab, cuda, name, dim):
    """Codes, metadata, windows and rotated queries of ordinary, zero, constant and huge rows."""
    n, shape = 21, dict(codec_name=name, dim=dim, kv_heads=2, group=2, dtype=torch.float16)
    x, same = (lab(lens=(n,), n_sink=4, n_recent=9, **shape) for _ in range(2))
    same.seg.params[0] = x.seg.params[0]
    same.req_to_token = x.req_to_token
    q, k, v = x.qkv(n)
    for t in (k, v):
        t[0], t[1], t[2] = 0.0, 1.5, 300 * t[2]
    view = x.view()
    q_rot = query_buffer(view, n, 4).fill_(float("nan"))
    cuda_store.store(view, x.batch([(0, 0, n)]), q, k, v, q_rot)
    same.reference_store(0, 0, n, k, v)
    want = prepare_queries(view, q)
    torch.testing.assert_close(q_rot[..., :dim], want[..., :dim], rtol=1e-3, atol=1e-3)
    got, want = (c[..., dim:].view(torch.float16).float() for c in (q_rot, want))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)
    slots = x.req_to_token[1, :n].long()
    for got, want in zip(
        x.seg.history.read(0, slots), same.seg.history.read(0, slots), strict=True
    ):
        equal = (got.packed == want.packed).all(-1) & (got.meta == want.meta).all(-1)
        assert equal.float().mean() >= 0.95
    for window in ("sink_k", "sink_v", "recent_k", "recent_v"):
        got, want = (getattr(y.seg.windows, window)[0][1] for y in (x, same))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["feedback", "compact", "accurate", "position"])
def test_codes_written_beside_merge(lab, cuda, name):
    """rotate, attend and an encoding merge: bit-equal to store, attend and merge."""
    lens, shape = [150, 3], dict(kv_heads=2, group=2, dim=64, n_sink=8, n_recent=30)
    x = lab(lens=lens, codec_name=name, dtype=torch.float16, **shape)
    x.fill(lens)
    ends = torch.tensor(lens) + 1
    where, (q, k, v) = x.batch([(0, 150, 151), (1, 3, 4)]), x.qkv(2)
    part = Partials(2, UNPAGED.splits, 2, 2, 64, "cpu")
    results = []
    for beside in (True, False):
        view = x.view()
        q_rot = query_buffer(view, 2, 4)
        out = torch.full((2, 4, 64), float("nan"), dtype=torch.float16)
        write = cuda_store.rotate if beside else cuda_store.store
        fresh = write(view, where, q, k, v, q_rot)
        start = x.seg.windows.recent_start
        plan_attend(part.plan, x.rows, ends, start, x.windows, UNPAGED.splits)
        cuda_attend.attend(UNPAGED, part, view, q_rot, x.req_to_token, 0.125)
        cuda_attend.merge(part, view, out, fresh=fresh)
        results.append((out, x.seg.history.blocks[0].clone()))
        x.seg.history.blocks[0].view(-1)[:64].fill_(0)  # of slots that nobody has
    (out, blocks), (want, blocks_wanted) = results
    assert out.isfinite().all() and torch.equal(out, want)
    first = x.block if x.block > 1 else 16
    used = x.req_to_token[x.rows].flatten()
    used = used[used >= first].unique().long() // 16
    assert torch.equal(blocks[used], blocks_wanted[used])


@pytest.mark.parametrize("name", ["compact", "omni"])
def test_a_server_checks_its_kernels(lab, cuda, monkeypatch, name):
    """``selftest.check_served`` as a server with a GPU runs it, down to the launches."""
    monkeypatch.setattr(cuda_attend, "supported", lambda *_: True)
    taken = []

    def supported(view, *_):
        taken.append(cuda_store.has_codec(view.spec))
        return taken[-1]

    monkeypatch.setattr(cuda_store, "supported", supported)
    spec = codec.CODECS[name]
    attention = DecodeAttention(
        heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, device="cpu", max_batch=3,
        windows=WindowLayout(6, spec.ring_tokens(10)), page_size=max(16, spec.block),
        block=spec.block,
    )  # fmt: skip
    cache = lab(kv_heads=1, dim=64, lens=(8,), codec_name=name, dtype=torch.float16)
    check_served(attention, spec, cache.seg.params[0])
    assert attention.cuda and all(taken) == (name != "omni")


def test_threads_that_wait_in_vain_are_noticed(compiler, tmp_path):
    """The emulator itself: an instruction that not all lanes of a warp reach ends the process."""
    source = tmp_path / "part.cpp"
    source.write_text(
        '#include "block.h"\nint main() {\n'
        "  Block::self().run(32, [] { if (threadIdx.x < 7) Block::self().meet_warp(); });\n}\n"
    )
    program = tmp_path / "part"
    command = ["g++", "-std=c++20", "-w", f"-I{EMULATOR}", source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode != 0 and "wait for each other" in done.stderr


def added(text: str) -> str:
    return text.replace("int batch, n_sink,", "int batch, spare, n_sink,")


def hidden(text: str) -> str:
    """A field where the compiler leaves a gap, so that the size stays."""
    return text.replace("  int zero; ", "  int zero, spare; ")


def swapped(text: str) -> str:
    text = text.replace("const u16* sink_k;", "const u16* later;")
    return text.replace("const u16* sink_v;", "const u16* sink_k;").replace("* later;", "* sink_v;")


@pytest.mark.parametrize("change", [None, added, hidden, swapped], ids=lambda c: c and c.__name__)
def test_an_argument_block_that_is_not_its_mirror_does_not_compile(compiler, tmp_path, change):
    folder = tmp_path / "sources"
    shutil.copytree(SOURCES, folder)
    if change:
        text = (folder / "work.cu").read_text()
        assert change(text) != text
        (folder / "work.cu").write_text(change(text))
    compiles_as_mirrored(compiler, folder, cuda_attend.ATTEND, fails=bool(change))


def compiles_as_mirrored(compiler, folder: Path, source: Source, fails: bool) -> None:
    shape = Shape(codec.CODECS["feedback"].layout(2, 64), 2, False, 0)
    defines = dict(cuda_attend.attend_defines(PAGED, shape, False, False))
    built = source, defines, folder / "part", folder, "-fsyntax-only"
    if not fails:
        return compiler.compile(*built)
    with pytest.raises(subprocess.CalledProcessError) as error:
        compiler.compile(*built)
    message = error.value.stderr
    assert "blank_Args" in message or "is not as its ctypes mirror" in message, message[-2000:]


@pytest.mark.parametrize("change", ["added", "missing", "wider"])
def test_a_mirror_that_is_not_its_argument_block_does_not_compile(compiler, tmp_path, change):
    fields = list(cuda_attend.Args._fields_)
    if change == "added":
        fields.append(("spare", ctypes.c_int64))
    elif change == "missing":
        fields.remove(("channels", ctypes.c_void_p))
    else:
        fields[fields.index(("zero", ctypes.c_int))] = ("zero", ctypes.c_int64)  # the same size
    mirror = type("Args", (ctypes.Structure,), {"_fields_": fields})
    source = cuda_attend.ATTEND._replace(mirrors=(mirror,))
    folder = tmp_path / "sources"
    shutil.copytree(SOURCES, folder)
    compiles_as_mirrored(compiler, folder, source, fails=True)
