"""Do the tests notice? Deliberate faults in the pool's code, in the Triton kernels, in the CUDA
kernels and in what surrounds them, one at a time: each must fail a test.

    python -m tests.mutation_check [NAME ...]
    python -m tests.mutation_check --few NUMBER     one of each kind, others for the next number

No file is changed: each fault is put into the source while a forked child imports it, or into a
copy that the child builds. Kernels run in Triton's interpreter and in the emulator, so this is for
a machine without a GPU. Exit status 1 if a fault passes all tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.planted import Fault, failing_tests

POOL_TESTS = ("test_reference.py", "test_blocks.py", "test_debug_tags.py", "test_faults.py")
POOL_TESTS += ("test_ownership.py",)
KERNEL_FILES = ("store_windows", "store", "seal", "attend", "materialise", "begin")
KERNEL_TESTS = tuple(f"kernels/test_{name}.py" for name in KERNEL_FILES)
CUDA_TESTS = ("kernels/test_emulated.py",)
HOST_TESTS = ("test_weights.py", "test_kept.py", "test_parking.py", "test_resume.py")
HOST_TESTS += ("test_gpu_tags.py", "test_debug_tags.py", "test_layout.py")


POOL_FAULTS = {
    "history one token too short": Fault(
        "reference.py", "first_exact(prefix_lens + 1,", "first_exact(prefix_lens,"
    ),
    "history one token too long": Fault(
        "reference.py", "first_exact(prefix_lens + 1,", "first_exact(prefix_lens + 2,"
    ),
    "stale ring after a prefix hit": Fault(
        "reference.py",
        "torch.maximum(recent_start, seq_lens - n_recent)",
        "seq_lens - n_recent",
    ),
    "stale ring after a turn that was cut": Fault(
        "reference.py", "    seg.windows.go_on(rows, prefix_lens)\n", ""
    ),
    "a cut forgets one ring row too few": Fault(
        "stores.py", "written - self.windows.n_recent)", "written - self.windows.n_recent - 1)"
    ),
    "ring read one row off": Fault(
        "stores.py",
        "index = positions % self.windows.n_recent\n        return self.recent_k",
        "index = (positions + 1) % self.windows.n_recent\n        return self.recent_k",
    ),
    # One row less would change nothing: attention reads the last n_recent - 1 of the prefix.
    "oldest ring rows not written": Fault(
        "stores.py", "positions >= ends - w.n_recent", "positions >= ends - w.n_recent + 2"
    ),
    "a ring taken over one row off": Fault(
        "stores.py", "rings[:, source, index]", "rings[:, source, index - 1]"
    ),
    "a ring taken over that was written further": Fault(
        "../oscar_sglang/pool/parking.py",
        "written + 1 - self.n_recent",
        "written - 3 - self.n_recent",
    ),
    "sink cache without its tag": Fault(
        "stores.py",
        "return self.tag[slots % self.tag.shape[0]] == slots",
        "return self.tag[slots % self.tag.shape[0]] >= 0",
    ),
    "wrong tag": Fault(
        "stores.py", "self.tag[slots % self.tag.shape[0]] = slots", "self.tag[slots % 3] = slots"
    ),
    "swapped scales of K and V": Fault(
        "stores.py", "torch.cat([k.meta, v.meta], -1)", "torch.cat([v.meta, k.meta], -1)"
    ),
    "padding claims a sink-cache row": Fault("reference.py", " & (slots > 0)", ""),
    "padding writes a live row": Fault(
        "reference.py", "token_rows = rows[request]", "token_rows = rows[request].clamp_min(1)"
    ),
    "rows of another request": Fault(
        "reference.py",
        "seg.windows.write(layer, batch.token_rows,",
        "seg.windows.write(layer, batch.rows.min().expand_as(batch.token_rows),",
    ),
    "slot table read one off": Fault(
        "reference.py",
        "slots = req_to_token[row, first : first + n].long()",
        "slots = req_to_token[row, first + 1 : first + n + 1].long()",
    ),
    "tile boundary one off": Fault(
        "reference.py",
        "low, high = max(n_sink, start), min(hist_end, stop)",
        "low, high = max(n_sink, start + 1), min(hist_end, stop)",
    ),
    "restored sinks from the wrong source": Fault(
        "reference.py", "miss = ~hit[:, None, None]", "miss = hit[:, None, None]"
    ),
    "one position read from two segments": Fault(
        "reference.py",
        "exact_from = max(n_sink, hist_end)",
        "exact_from = max(n_sink, hist_end - 1)",
    ),
    "history ends inside a block": Fault(
        "reference.py", "return (low + (-low) % block)", "return low"
    ),
    "a block sealed before its last token": Fault(
        "reference.py", "seq_len - block + 1, block)", "seq_len - block + 2, block)"
    ),
    "a block sealed from other ring rows": Fault(
        "reference.py", "torch.arange(first, fresh_from", "torch.arange(first - 1, fresh_from - 1"
    ),
    "a block sealed after its chunk went to the ring": Fault(
        "reference.py",
        "    if seg.spec.block > 1:\n        seal(seg,",
        "    where = batch.token_rows, batch.positions, batch.ends\n"
        "    seg.windows.write(layer, *where, k_rot, v_rot)\n"
        "    if seg.spec.block > 1:\n        seal(seg,",
    ),
    "channels of the next page": Fault(
        "reference.py", "channels[layer][slots // spec", "channels[layer][1 + slots // spec"
    ),
    "keys encoded for another tile": Fault(
        "reference.py",
        "spec.encode_k(params, k_rot, batch.positions)",
        "spec.encode_k(params, k_rot, batch.positions + 16)",
    ),
    "keys decoded for another tile": Fault(
        "reference.py",
        "read_history(seg, layer, slots[part], positions)",
        "read_history(seg, layer, slots[part], positions + 16)",
    ),
    "lost sinks decoded for another tile": Fault(
        "reference.py",
        "read_history(seg, layer, slots, positions)",
        "read_history(seg, layer, slots, positions + 16)",
    ),
    "queries turned as keys are": Fault(
        "reference.py", "rotate(q, params.queries)", "rotate(q, params.r_k)"
    ),
    "metadata of a row of 2 bits": Fault(
        "stores.py", "meta_size = h.block_bytes - k_size", "meta_size = h.block_bytes - v_size"
    ),
    "empty segment not guarded": Fault(
        "reference.py", "torch.where(total > 0, 1 / total, torch.zeros_like(total))", "1 / total"
    ),
}


KERNEL_FAULTS = {
    "store: ring row one off": Fault(
        "store.py", "row * n_recent + pos % n_recent", "row * n_recent + (pos + 1) % n_recent"
    ),
    "store: a row too many in the sink": Fault("store.py", "(pos < n_sink)", "(pos <= n_sink)"),
    "store: stale rows of a chunk in the ring": Fault(
        "store.py", "in_ring = ok & (pos >= end - n_recent)", "in_ring = ok"
    ),
    "store: range without its lower end": Fault(
        "rows.py",
        "nearest_code(y, inv[:, None], lo[:, None], LEVELS)",
        "nearest_code(y, inv[:, None], 0.0, LEVELS)",
    ),
    "store: feedback by the transposed factor": Fault(
        "store.py", "factor + j * D + cols", "factor + cols * D + j"
    ),
    "store: V written over K": Fault(
        "store.py", "codes, step, lo, 1, TB, Hk, D)", "codes, step, lo, 0, TB, Hk, D)"
    ),
    "store: sink cache gets no V": Fault(
        "store.py", "write_row(cache_v, cached,", "write_row(cache_k, cached,"
    ),
    "attend: a row too many of history": Fault(
        "attend.py", "(pos >= lo_pos) & (pos < end)", "(pos >= lo_pos) & (pos <= end)"
    ),
    "seal: a sink token widens the ranges": Fault("seal.py", "(pos >= n_sink) |", "(pos >= 0) |"),
    "seal: fresh tokens of another request": Fault(
        "seal.py", "fresh & (tl.load(rows + source, fresh, 0) == row)", "fresh"
    ),
    "seal: padding is sealed": Fault("seal.py", " & (row > 0)", ""),
    "seal: ring row one off": Fault("seal.py", "+ pos % n_recent)", "+ (pos + 1) % n_recent)"),
    "attend: channels of the first page": Fault(
        "attend.py", "tl.max(tl.where(ok, slot // PAGE, 0), 0)", "tl.min(slot // PAGE, 0)"
    ),
    "attend: 32 tokens of one page": Fault(
        "attend.py", "BLOCK if FORM == CHANNEL else TILE_TOKENS", "TILE_TOKENS"
    ),
    "attend: reference moved, sum not": Fault("attend.py", "acc * fade[:, None], p", "acc, p"),
    "attend: queries see later tokens": Fault(
        "attend.py", " & (pos[None, :] <= q_pos[:, None])", ""
    ),
    "attend: K's offset left out": Fault("attend.py", " + q_sum[:, None] * lo[None, :]", ""),
    "attend: ring read one off": Fault(
        "attend.py", "row * n_recent + pos % n_recent", "row * n_recent + (pos + 1) % n_recent"
    ),
    "attend: sink of the first row": Fault(
        "attend.py", "index = row * n_sink + pos", "index = pos"
    ),
    "merge: partial results of the neighbour": Fault(
        "merge.py", "part = ((i + b).to(tl.int64)", "part = ((i + 0 * b).to(tl.int64)"
    ),
    "merge: V rotated again instead of back": Fault(
        "merge.py", "some[None, :] * D + cols[:, None]", "cols[:, None] * D + some[None, :]"
    ),
    "merge: splits weighed alike": Fault(
        "merge.py", "tl.where(used, tl.exp2(m_i - m_new), 0.0)", "tl.where(used, 1.0, 0.0)"
    ),
    # A row too many of history would change nothing: the exact row is written over it.
    "materialise: first exact row left out": Fault(
        "materialise.py",
        "(pos >= n_sink) & (pos >= boundary)",
        "(pos >= n_sink) & (pos > boundary)",
    ),
    "materialise: V decoded from K": Fault(
        "materialise.py",
        "blocks, slot, history, head, 1, grid",
        "blocks, slot, history, head, 0, grid",
    ),
    "materialise: every prefix starts at 0": Fault(
        "materialise.py", "tl.load(starts + request).to(tl.int64) + i", "i"
    ),
    "materialise: means of other positions": Fault(
        "materialise.py", "((pos // TURN * Hk + head)", "((pos // (2 * TURN) * Hk + head)"
    ),
    "store: keys' means of other positions": Fault(
        "store.py", "units, pos // TURN, ok", "units, pos // (2 * TURN), ok"
    ),
    "store: no gain": Fault("store.py", "sound = (found > 0)", "sound = (found < 0)"),
    "begin: a ring row too few": Fault("begin.py", "(position >= first)", "(position > first)"),
    "begin: rows that go on": Fault(
        "begin.py", "(tl.load(started + request) != 0) & (from_row", "(from_row"
    ),
    "attend: means of other positions": Fault(
        "attend.py", "turn = (pos // TURN)", "turn = (pos // (2 * TURN))"
    ),
}


CUDA_FAULTS = {
    "a field that its mirror lacks": Fault(
        "work.cu",
        "int batch, n_sink, n_recent, columns;",
        "int batch, n_sink, n_recent, spare, columns;",
    ),
    "a mirror's fields in another order": Fault(
        "cuda_args.py", '("k_rank", "v_rank")', '("v_rank", "k_rank")'
    ),
    "shared memory beside the tiles counted short": Fault(
        "cuda_attend.py", "side = 512 * means", "side = 256 * means"
    ),
    "window: ring row one off": Fault(
        "warp.cu", "sink ? p0 : p0 % rows", "sink ? p0 : (p0 + 1) % rows"
    ),
    "window: queries see later tokens": Fault("warp.cu", "p < end && p <= q_pos0", "p < end"),
    "history: tokens past its end are seen": Fault(
        "warp.cu", "if (i < from || i >= to)", "if (i < from)"
    ),
    "reference moved, sum not": Fault("columns.cu", "l0 *= f0; l1 *= f1; z0", "z0"),
    "windows joined unweighed": Fault("columns.cu", "before * ((e & 1) ? g1 : g0)", "before"),
    "channels of a split's first page only": Fault(
        "work.cu", "(first || tile_base(a, tile) % PAGE == 0)", "first"
    ),
    "lo of half the channels": Fault("warp.cu", "lo[0][0] + lo[1][0]", "lo[0][0]"),
    "K's lo left out": Fault(
        "meta.cu", "make_float2(k.x * unit, k.y)", "make_float2(k.x * unit, 0.f)"
    ),
    "V's step is K's": Fault(
        "meta.cu",
        "float value_log2(const Token& m) const { return octaves(m.w, 2)",
        "float value_log2(const Token& m) const { return octaves(m.w, 0)",
    ),
    "levels too close": Fault("meta.cu", "0x46AB46ABu", "0x46004600u"),
    "norm of the neighbour": Fault("meta.cu", "(row * 6 & ~3)", "((row ^ 1) * 6 & ~3)"),
    "V's first lo left out": Fault("meta.cu", "lo_step[1], l * lo_first[1]", "lo_step[1], 0.f"),
    "big steps overflow": Fault("meta.cu", "BIG_STEP = 0x5800", "BIG_STEP = 0x7C00"),
    "V's metadata over K's": Fault("codes.cu", "kv * (META_BYTES / 2)", "0 * (META_BYTES / 2)"),
    "rank one off": Fault("codes.cu", "int drop = D - 1 - rank", "int drop = D - 2 - rank"),
    "copies not waited for": Fault(
        "attend.cu", "wait_copies<STAGES - 2>", "wait_copies<STAGES - 1>"
    ),
    "splits weighed alike": Fault(
        "merge.cu", "ml[u][r].y > 0.f ? ex2(ml[u][r].x - now) : 0.f", "ml[u][r].y > 0.f ? 1.f : 0.f"
    ),
    "V rotated as K": Fault("store.cu", "(KEY ? a.r_k : a.r_v)", "a.r_k"),
    "a row too many in the sink": Fault(
        "rows.cu", "if (pos < a.n_sink) write", "if (pos <= a.n_sink) write"
    ),
    "means of the next positions": Fault(
        "warp.cu", "turn = (pos >> 4) + 2 * stride", "turn = (pos >> 4) + 1 + 2 * stride"
    ),
    "biases of another group": Fault("warp.cu", "if (FIRST || w.group_ends())", "if (FIRST)"),
    "codes counted from 0": Fault(
        "warp.cu", "start[4] = {sum0, sum1, sum0, sum1}", "start[4] = {0.f, 0.f, 0.f, 0.f}"
    ),
    "upper codes of 4 bits": Fault("meta.cu", "p >= 2 ? w >> 8", "p >= 3 ? w >> 8"),
    "keys' means of other positions": Fault(
        "position.cu", "(m.positions[token] >> 4)", "(m.positions[token] >> 5)"
    ),
    "no gain": Fault(
        "position.cu", "step_byte(key.step * gain, grid[0])", "step_byte(key.step, grid[0])"
    ),
    "errors not fed back": Fault("codes.cu", "fmaf(-e, f[i][k], y.v[k])", "fmaf(-e, 0.f, y.v[k])"),
}


HOST_FAULTS = {
    "BF16's share of padded heads by stored channels": Fault(
        "layout.py",
        "self.history.kv_heads * 2 * self._model_head_dim * 2\n",
        "self.history.kv_heads * 2 * self.history.head_dim * 2\n",
    ),
    "bits of padded heads by stored channels": Fault(
        "layout.py", "return stored * self.history.head_dim / self._model_head_dim", "return stored"
    ),
    "weights: half as many pieces": Fault(
        "../oscar_sglang/artifact/weights.py",
        "(t.size * i // count, PIECE)",
        "(t.size * (i // 2) // count, PIECE)",
    ),
    "weights: experts count as one": Fault(
        "../oscar_sglang/artifact/weights.py", "count *= stacked", "count *= 1"
    ),
    "weights: names do not count": Fault(
        "../oscar_sglang/artifact/weights.py",
        "[t.name, t.kind, t.shape, content]",
        "[t.kind, content]",
    ),
    "weights: the head counts": Fault(
        "../oscar_sglang/artifact/weights.py", "if not _HEAD.search(t.name)", "if t.name"
    ),
    "weights: a tied head does not": Fault(
        "../oscar_sglang/artifact/weights.py",
        "if any(_EMBEDDING.search(t.name) for t in tensors):",
        "if tensors:",
    ),
    "weights: optimiser states count": Fault(
        "../oscar_sglang/artifact/weights.py", "if not n.endswith(_NOT_WEIGHTS)", "if n"
    ),
    "weights: files beside the index count": Fault(
        "../oscar_sglang/artifact/weights.py", "[n for n in files if n in wanted]", "files"
    ),
    "kept: what is in use is swept": Fault(
        "../oscar_sglang/artifact/kept.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN"
    ),
    "kept: damaged files are trusted": Fault(
        "../oscar_sglang/artifact/kept.py",
        "read_header(path)  #",
        "path.stat() or read_header(path)  #",
    ),
    "state: sums of a folder, not of its files": Fault(
        "../calibration/engines.py", "[str(file.resolve()) for file", "[str(file) for file"
    ),
    "parking: other keys of the prefix cache": Fault(
        "../oscar_sglang/pool/parking.py", "or ring.key != key or", "or"
    ),
    "parking: a stale ring": Fault(
        "../oscar_sglang/pool/parking.py",
        "        for row in chosen:\n            self._left.pop(row, None)\n",
        "",
    ),
    "parking: a source that a neighbour gets": Fault(
        "../oscar_sglang/pool/parking.py", "ring.row != row and ring.row in chosen", "False"
    ),
    "parking: tokens that part are one text": Fault(
        "../oscar_sglang/pool/parking.py", "int(differ.argmax()) if differ.any() else n", "n"
    ),
    "tags: rings are taken over unseen": Fault(
        "../oscar_sglang/watch/tags.py",
        "        self._compare(self.ring, (row, position), old, chains, mine.flatten(), sums)\n",
        "",
    ),
    "tags: never armed, never noticed": Fault(
        "../oscar_sglang/watch/tags.py",
        "self.unarmed_steps > UNARMED_STEPS",
        "self.unarmed_steps < 0",
    ),
    "tags: what lies there is taken for what was written": Fault(
        "../oscar_sglang/watch/read_tags.py",
        "return self.handed",
        "return self._sums(places, address)",
    ),
    "tags: decoded sinks are taken as they are": Fault(
        "../oscar_sglang/watch/read_tags.py", "if held := int(given.sum()):", "if held := 0:"
    ),
    "tags: reads from any segment": Fault(
        "../oscar_sglang/watch/read_tags.py", "if read.places is not expected:", "if False:"
    ),
    "tags: checks without the kernels": Fault(
        "../oscar_sglang/watch/tags.py",
        "self.probed_requests += self.probe(rows, prefix, plan)",
        "pass",
    ),
}


class Kind(NamedTuple):
    """Faults, the tests that must notice one, those of them that cannot (pytest's -k), and whether
    all failures are named: interpreted kernels are slow, and one will do."""

    faults: dict[str, Fault]
    tests: tuple[str, ...]
    choose: str = ""
    all: bool = False


KINDS = {
    "cuda": Kind(CUDA_FAULTS, CUDA_TESTS),
    "triton": Kind(KERNEL_FAULTS, KERNEL_TESTS),
    "pool": Kind(POOL_FAULTS, POOL_TESTS, "not calibrat and not cache and not disk", all=True),
    "host": Kind(HOST_FAULTS, HOST_TESTS, "not sglangs and not random_walks"),
}


def few(number: int) -> list[str]:
    """Names of one fault of each kind; consecutive numbers go round all of them."""
    return [list(faults)[number % len(faults)] for faults, *_ in KINDS.values()]


def check(kind: Kind, wanted: list[str], once: bool) -> int:
    """How many of the faults that are ``wanted`` (all, if none is named) pass every test. ``once``:
    stop at the first failure, and leave it to others that there is none without a fault."""
    faults = {name: f for name, f in kind.faults.items() if not wanted or name in wanted}
    stop = once or not kind.all
    if faults and not once and (clean := failing_tests(None, kind.tests, kind.choose, stop)):
        raise SystemExit(f"fail even without a fault: {', '.join(clean)}")
    missed = 0
    for name, fault in faults.items():
        own = f"test_{Path(fault.file).stem}"  # first, where the first failure ends it
        tests = tuple(sorted(kind.tests, key=lambda t: own not in t))
        names = failing_tests(fault, tests, kind.choose, stop)
        missed += not names
        files = {f: [n for n in names if n.startswith(Path(f).name)] for f in tests}
        caught = "; ".join(f"{v[0]} (+{len(v) - 1})" for v in files.values() if v)
        print(f"{'caught' if names else 'MISSED'}  {name}: {caught or names}", flush=True)
    return missed


def main(wanted: list[str]) -> int:
    once = wanted[:1] == ["--few"]
    if once:
        wanted = few(int(wanted[1]))
    if unknown := set(wanted) - {name for faults, *_ in KINDS.values() for name in faults}:
        raise SystemExit(f"no such fault: {', '.join(unknown)}")
    os.environ.setdefault("OSCAR_OWNERSHIP", "400x3")
    from oscar_sglang.launch_server import enter_cpu_mode

    enter_cpu_mode()
    import torch

    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at its import, so before SGLang's
    import triton.experimental.gluon.language  # noqa: F401

    missed = sum(check(KINDS[kind], wanted, once) for kind in ("cuda", "triton"))
    del os.environ["TRITON_INTERPRET"]
    import hypothesis  # noqa: F401  (imports that every child would repeat)
    import sglang.srt.mem_cache.radix_cache  # noqa: F401
    import transformers  # noqa: F401

    missed += sum(check(KINDS[kind], wanted, once) for kind in ("pool", "host"))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
