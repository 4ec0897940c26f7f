"""Run by test_pool.py in a process of its own: codes of the same tokens, stored in many ways.

    python -m tests.runners.pool_codes MODEL ARTIFACT PAGE_SIZE   -> JSON on the last line of stdout

Each way of scheduling reports the fraction of differing code bytes and metadata against the
plain prefill of the same process; ``digest`` lets two processes be compared.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from scripts.lib.inprocess import Runner
from tests.support.vectors import DATA

LENGTH = 200


def main(model: str, artifact: str, page_size: int) -> None:
    runner = Runner(model, artifact, page_size=page_size)
    with np.load(DATA / "smollm2_tokens.npz") as z:
        documents = [z[k][:LENGTH].tolist() for k in z.files if k.startswith("test_")] * 2
    ids = documents[0]
    layers = range(runner.pool.layer_num)

    def stored(request):
        rows = [runner.history_rows(request, layer, LENGTH) for layer in layers]
        packed = torch.stack([torch.cat([k.packed, v.packed], -1) for k, v in rows])
        meta = torch.stack([torch.cat([k.meta, v.meta], -1) for k, v in rows])
        return packed, meta

    def prefill(row, chunk, batch=1):
        requests = [runner.request(row + i) for i in range(batch)]
        for start in range(0, LENGTH, chunk):
            part = [
                (r, d[start : start + chunk]) for r, d in zip(requests, documents, strict=False)
            ]
            runner.extend(*part)
        return requests[0]

    plain = stored(prefill(1, LENGTH))
    ways = {
        "chunk 17": prefill(1, 17),
        "chunk 64": prefill(1, 64),
        "batch of 8": prefill(1, LENGTH, batch=8),
    }
    decoded = runner.request(1)
    runner.extend((decoded, ids[:150]))
    for token in ids[150:]:
        runner.decode((decoded, token))
    ways["decode"] = decoded
    spacing = plain[1].float().abs().amax(-1, keepdim=True) * 2**-10
    report = {}
    for name, request in ways.items():
        packed, meta = stored(request)
        # Only tokens whose own K and V see no codes in this schedule must agree exactly; with
        # recent 256 > LENGTH all of them do.
        report[name] = {
            "codes": (packed != plain[0]).float().mean().item(),
            "meta": (meta != plain[1]).float().mean().item(),
            # Largest difference in units of FP16 spacing at the row's largest stored number.
            "meta_spacings": ((meta - plain[1]).abs().float() / spacing).max().item(),
        }
    digest = [int(x.view(torch.uint8).long().sum()) for x in plain]
    print(json.dumps({"ways": report, "digest": digest}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
