"""Run by serving/test_codecs.py in a process of its own: are the server's codes the evaluator's?

    python -m tests.runners.codec_parity MODEL ARTIFACT   -> JSON on the last line of stdout

The same tokens run through SGLang on the int2 pool and through transformers under the evaluator's
``capture``. Reports the fraction of history rows whose codes and metadata are equal, byte for byte,
and the bits per element that either side counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.lib.inprocess import Runner

LENGTH = 150  # within the exact windows: no row's own K and V depend on codes
SINK = 64


def compare(model: str, artifact: str) -> dict:
    runner = Runner(model, artifact, skip_tokenizer_init=True, max_total_tokens=512, rows=3)

    from oscar_sglang.artifact.file import load
    from oscar_sglang.calibration.collect import load_model
    from oscar_sglang.calibration.continuation import capture
    from oscar_sglang.calibration.methods import METHODS
    from oscar_sglang.kernels.codec import Rows
    from scripts.lib.tiny_models import random_ids

    ids = random_ids(LENGTH + 1)[0]
    request = runner.request(1)
    runner.extend((request, ids[:100].tolist()))
    runner.extend((request, ids[100 : LENGTH - 10].tolist()))
    for token in ids[LENGTH - 10 : LENGTH].tolist():
        runner.decode((request, token))

    fitted = load(artifact)
    method, document = METHODS[fitted.codec], capture(load_model(Path(model), "cpu"), ids, rows=1)
    equal = rows = encoded_bytes = elements = 0
    block = fitted.spec.block
    # Of a block codec the first block, whose sink tokens the evaluator leaves out.
    part = slice(SINK, block) if block > 1 else slice(0, LENGTH)
    for layer, params in enumerate(fitted.codecs):
        k, v = document.k[layer][part].float(), document.v[layer][part].float()
        encoded = method.encode(params, k, v, part.start)
        judged = Rows(*encoded.k[:2]), Rows(*encoded.v)
        if block > 1:
            packed, norm, channels = encoded.k
            judged = Rows(packed, norm), judged[1]
            page = request.slots[0] // block
            mine = runner.segments.history.channels[layer][page]
            assert (mine == channels).float().mean() > 0.95  # the rest is one FP16 rounding off
        stored = runner.history_rows(request, layer, part.stop)
        for mine, theirs in zip(stored, judged, strict=True):
            packed, meta = mine.packed[part.start :], mine.meta[part.start :]
            same = (packed == theirs.packed).all(-1) & (meta == theirs.meta).all(-1)
            equal, rows = equal + int(same.sum()), rows + same.numel()
        whole = [x[layer][: part.stop].float() for x in (document.k, document.v)]
        encoded_bytes += method.encode(params, *whole).num_bytes
        elements += 2 * whole[0].numel()
    bits = {"server": runner.pool.stats()["bits_per_element"], "eval": 8 * encoded_bytes / elements}
    return {"codec": fitted.codec, "equal": equal / rows, "bits": bits}


if __name__ == "__main__":
    print(json.dumps(compare(*sys.argv[1:])))
