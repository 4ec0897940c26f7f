"""Run by test_sglang_engine.py: statistics taken inside SGLang against those of transformers.

python -m tests.runners.statistics_parity MODEL DATA RANKS   -> JSON on the last line of stdout
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from oscar_sglang.calibration.collect import collect, load_model, score
from oscar_sglang.calibration.data import load_tokens
from oscar_sglang.calibration.fit import fit_layer
from oscar_sglang.calibration.model_fit import Fitter
from oscar_sglang.calibration.sglang_engine import collect_in_sglang
from oscar_sglang.calibration.widths import probe_ids
from oscar_sglang.kernels.codec import CODECS, rotate
from tests.support import gated_delta_net


def main(model_dir: str, data: str, ranks: str) -> None:
    torch.set_num_threads(1)
    if "qwen3.5" in model_dir:
        gated_delta_net.install()
    model, tokens = Path(model_dir), load_tokens(data, Path(model_dir), 3000)
    fit = Fitter("position", 4096, 64)
    inside, names, scores = collect_in_sglang(model, tokens.sequences, tp=int(ranks), fit=fit)
    loaded = load_model(model, "cpu")
    outside = collect(loaded, tokens.sequences)
    expected = score(loaded, probe_ids(tokens.sequences, 64), fit(outside), 64)
    pairs = zip(scores, expected, strict=True)
    gap = max(abs(a / b - 1) for x, y in pairs for a, b in zip(x, y, strict=True))
    assert len(scores) == len(inside) and gap < 0.02, gap
    assert len(inside) == len(outside) and any("qkv_proj" in n for n in names)
    spec, differ, total = CODECS["feedback"], 0, 0
    for a, b in zip(inside, outside, strict=True):
        assert a.count == b.count == sum(len(s) - 64 for s in tokens.sequences) - len(a.held_k)
        for field in ("k_mean", "ktk", "vtv", "qtq", "oto", "held_k", "held_v"):
            x, y = getattr(a, field), getattr(b, field)
            gap = float((x - y).norm() / y.norm())
            assert gap < 1e-3, (field, gap)
        assert a.before.rope == b.before.rope and any(a.before.rope.theta)
        assert (a.before.held_positions == b.before.held_positions).all()
        for field in ("k_mean", "ktk", "qtq"):
            x, y = getattr(a.before, field), getattr(b.before, field)
            gap = float((x - y).norm() / y.norm())
            assert gap < 1e-3, ("before", field, gap)
        p, r = (fit_layer(m, "feedback").params for m in (a, b))
        for code, held, m, n in (
            (lambda q, y: spec.encode_k(q, y), b.held_k, p.r_k, r.r_k),
            (lambda q, y: spec.encode_v(q, y), b.held_v, p.r_v, r.r_v),
        ):
            one, two = code(p, rotate(held, m)).packed, code(r, rotate(held, n)).packed
            differ += int((one != two).sum())
            total += one.numel()
    assert differ <= total // 10000, (differ, total)
    print(json.dumps({"compared": total}))


if __name__ == "__main__":
    main(*sys.argv[1:])
