"""The warp-level code of the CUDA kernels on a CPU (``emulator/``): attend and store, every codec.

Tolerances: attend 2e-3 relative RMS (FP16 operands; ``lloyd``'s integer levels 3e-4); store the
same bytes but for rows at a tie of float32 rounding. $OSCAR_KERNEL_SOURCES: other sources to build
(``mutation_check.py``).
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from oscar_sglang.kernels import codec, cuda_attend, merge, plan
from oscar_sglang.kernels.attend import Partials
from oscar_sglang.kernels.cuda_args import CodeArgs, code_defines, pointer, shape_defines

HERE = Path(__file__).parent / "emulator"
KERNELS = os.environ.get("OSCAR_KERNEL_SOURCES", Path(plan.__file__).parent)
SPLITS = 5


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """emulator(view, heads, cap) -> the library compiled for that shape."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler (g++) to build the emulator with")
    folder, built = tmp_path_factory.mktemp("emulator"), {}

    def build(view, heads: int, cap: bool = False):
        defines = (*shape_defines(view, heads), *code_defines(view), ("SOFT_CAP", int(cap)))
        if defines not in built:
            file = folder / f"{len(built)}.so"
            flags = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
            flags += [f"-D{name}={value}" for name, value in defines]
            flags += [f"-DWIN_COST={plan.WINDOW_COST.value}", f"-I{HERE}", f"-I{KERNELS}"]
            subprocess.run(["g++", *flags, HERE / "warp.cpp", "-o", file], check=True)
            built[defines] = ctypes.CDLL(str(file))
        return built[defines]

    return build


def attend(emulator, x, seq_lens, q_lens, cap=0.0, spread=1.0):
    """out, lse of the emulated attend and the portable merge, and what float64 gives."""
    indptr = torch.tensor([0, *q_lens]).cumsum(0)
    heads, max_q, view = x.kv_heads * x.group, max(q_lens), x.view()
    part = Partials(len(seq_lens), SPLITS, x.kv_heads, max_q * x.group, x.dim, "cpu")
    part.o.fill_(float("nan")), part.ml.fill_(float("nan"))
    plan.plan_attend(
        part.plan, x.rows, torch.tensor(seq_lens), x.seg.windows.recent_start, x.windows, SPLITS,
        indptr, block=x.block,
    )  # fmt: skip
    q, scale = torch.randn(int(indptr[-1]), heads, x.dim) * spread, x.dim**-0.5
    log2e = math.log2(math.e)
    args = cuda_attend._Args(
        *(t.data_ptr() for t in (part.o, part.ml, part.plan, q, *view[2:7], x.req_to_token)),
        view.params.r_v.data_ptr(), x.req_to_token.stride(0), part.batch, view.windows.n_sink,
        view.windows.n_recent, part.columns, scale * log2e, cap * log2e, view.grid.data_ptr(),
        pointer(view.channels),
    )  # fmt: skip
    emulator(view, heads, cap > 0).attend(ctypes.byref(args), SPLITS)
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
    merge.merge(part, view, out, max_q, lse)
    want = [
        x.attention(b, q[indptr[b] : indptr[b + 1]], n, scale, cap) for b, n in enumerate(seq_lens)
    ]
    return out, lse, *(torch.cat(w) for w in zip(*want, strict=True))


# name of a codec and a remark -> shape of the cache
CASES = {
    "feedback": dict(dim=128), "feedback-64": dict(dim=64, kv_heads=1), "compact": dict(dim=128),
    "lloyd": dict(dim=128), "lloyd-64": dict(dim=64, kv_heads=1), "omni": dict(dim=128),
    "feedback-huge": dict(dim=64, spread=2000.0), "lloyd-huge": dict(dim=64, spread=2000.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_attend(lab, emulator, rms, case):
    """Ragged lengths and queries: windows alone, history, a ring that wraps, splits in between."""
    name = case.partition("-")[0]
    block = codec.CODECS[name].block
    lens, q_lens = ([300, 20, 180], [1, 3, 2]) if block == 1 else ([3 * block + 50, 20], [1, 3])
    shape = dict(kv_heads=2, group=4, n_sink=21, n_recent=40, dtype=torch.float16) | CASES[case]
    x = lab(lens=lens, codec_name=name, **shape)
    x.fill(lens)
    for spread in (1e-3, 3e-3) if case.endswith("huge") else (1.0, 6.0):
        out, lse, want, want_lse = attend(emulator, x, lens, q_lens, spread=spread)
        assert rms(out, want) < 2e-3
        assert (lse - want_lse).abs().max() < 2e-3 * max(1.0, float(want_lse.abs().max()))


def test_attend_with_a_soft_cap(lab, emulator, rms):
    x = lab(lens=(200,), codec_name="compact", kv_heads=1, group=2, dtype=torch.float16)
    x.fill((200,))
    out, lse, want, want_lse = attend(emulator, x, [200], [2], cap=3.0, spread=3.0)
    assert rms(out, want) < 2e-3 and (lse - want_lse).abs().max() < 2e-3


@pytest.mark.parametrize(
    "name, dim",
    [
        ("feedback", 128), ("feedback", 64), ("oscar", 64), ("lloyd", 128), ("compact", 64),
        ("accurate", 64), ("accurate-compact", 128),
    ],
)  # fmt: skip
def test_store(lab, emulator, name, dim):
    """Codes and metadata of ordinary, zero, constant and huge rows are the reference's bytes."""
    n = 24
    x = lab(lens=(n,), codec_name=name, dim=dim, kv_heads=2, group=4, dtype=torch.float16)
    view, spec, params = x.view(), x.seg.spec, x.seg.params[0]
    slots = x.req_to_token[1, :n].long()
    rows = torch.randn(2, n, 2, dim) + 0.5
    rows[:, 0], rows[:, 1], rows[:, 2] = 0.0, 1.5, 300 * rows[:, 2]
    library, args = emulator(view, 8), CodeArgs.of(view)
    for key in (True, False):
        fresh = rows[0 if key else 1].contiguous()
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (fresh, slots))
        library.store(ctypes.byref(args), *pointers, n, key)
    want = codec.encode_k(spec, params, rows[0]), codec.encode_v(spec, params, rows[1])
    for got, rows_wanted in zip(x.seg.history.read(0, slots), want, strict=True):
        same = (got.packed == rows_wanted.packed).all(-1) & (got.meta == rows_wanted.meta).all(-1)
        assert same[1:].float().mean() >= 0.95 and same[0].all()


def test_lanes_that_part_are_noticed(emulator, lab, tmp_path):
    """The emulator itself: an instruction that not all lanes reach ends the process."""
    source = tmp_path / "part.cpp"
    source.write_text(
        '#include "lanes.h"\nint main() {\n'
        "  Lanes::instance().run([] { if (threadIdx.x < 7) Lanes::instance().meet(); });\n}\n"
    )
    program = tmp_path / "part"
    command = ["g++", "-std=c++20", "-w", f"-I{HERE}", source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode != 0 and "diverged" in done.stderr
