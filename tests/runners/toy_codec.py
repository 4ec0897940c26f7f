"""A codec in one file: everything that serves, judges and shows codecs takes it up by itself.

    python -m tests.runners.toy_codec MODEL FOLDER   -> one JSON object on the last line of stdout

Run by serving/test_codecs.py in a process of its own. A row of ``toy`` costs 2 bits a channel and
its largest magnitude: levels lie at -1, -1/3, 1/3 and 1 times that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oscar_sglang.kernels.codec import CODECS, CodecSpec, Metadata, RangeRule, Rows
from oscar_sglang.kernels.codec_affine import pack, round_codes, to_half, unpack


@dataclass(frozen=True)
class Largest(Metadata):
    name = "largest"
    numbers = (1, 1)

    def encode_v(self, codec, params, y):
        largest = to_half(y.abs().amax(-1, keepdim=True))
        step_lo = torch.cat([2 / 3 * largest.float(), -largest.float()], -1)
        return Rows(pack(round_codes(y, step_lo)), largest)

    def decode_v(self, codec, params, rows):
        return (unpack(rows.packed).float() * (2 / 3) - 1) * rows.meta.float()

    def encode_k(self, codec, params, y, positions):
        return self.encode_v(codec, params, y)

    def decode_k(self, codec, params, rows, positions, channels):
        return self.decode_v(codec, params, rows)


RULE = RangeRule("shrink", 1.0)
CODECS["toy"] = CodecSpec("toy", "largest magnitude", RULE, RULE, meta=Largest(), fit="none")


def main(model: Path, folder: Path) -> None:
    from oscar_sglang.artifact.file import Fingerprint, data_free
    from oscar_sglang.calibration.report.charts import css_class
    from oscar_sglang.cli import main as command
    from oscar_sglang.config import OscarConfig

    evaluation, page, tokens = (folder / name for name in ("toy.json", "toy.html", "toy.npz"))
    np.savez(tokens, test_a=np.random.default_rng(0).integers(0, 256, 500))
    argv = ["eval", "--model", model, "--tokens", tokens, "--context", 500, "--greedy", 0]
    argv += ["--json", evaluation, "--html", page, "--codecs", "toy,naive"]
    assert command([str(x) for x in argv]) == 0
    rows = {r["codec"]: r for r in json.loads(evaluation.read_text())["results"]}

    artifact = folder / "toy.safetensors"
    data_free(Fingerprint.of(model), OscarConfig(codec="toy").codec).save(artifact)
    from .codec_parity import compare  # imports SGLang

    served = compare(str(model), str(artifact))
    kl = {name: row["kl"] for name, row in rows.items()}
    print(json.dumps({"served": served, "kl": kl, "css": css_class("toy")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
