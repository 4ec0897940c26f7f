"""Run by serving/test_codecs.py in a process of its own: are the server's codes the evaluator's?

    python codec_parity.py MODEL ARTIFACT   -> one JSON object on the last line of stdout

The same tokens run through SGLang on the int2 pool and through transformers under the evaluator's
``capture``. Reports the fraction of history rows whose codes and metadata are equal, byte for byte,
and the bits per element that either side counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts" / "lib")]

from inprocess import Runner  # noqa: E402

LENGTH = 150  # within the exact windows: no row's own K and V depend on codes


def main(model: str, artifact: str) -> None:
    runner = Runner(model, artifact, skip_tokenizer_init=True, max_total_tokens=512, rows=3)

    from tiny_models import random_ids

    from oscar_sglang.artifact import load
    from oscar_sglang.calibration.collect import load_model
    from oscar_sglang.calibration.continuation import capture
    from oscar_sglang.calibration.methods import METHODS
    from oscar_sglang.kernels.codec import Rows

    ids = random_ids(LENGTH + 1)[0]
    request = runner.request(1)
    runner.extend((request, ids[:100].tolist()))
    runner.extend((request, ids[100 : LENGTH - 10].tolist()))
    for token in ids[LENGTH - 10 : LENGTH].tolist():
        runner.decode((request, token))

    fitted = load(artifact)
    method, document = METHODS[fitted.codec], capture(load_model(Path(model), "cpu"), ids, rows=1)
    equal = rows = encoded_bytes = 0
    for layer, params in enumerate(fitted.layers):
        k, v = document.k[layer].float(), document.v[layer].float()
        encoded = method.encode(params, k, v)
        encoded_bytes += encoded.num_bytes
        judged = Rows(*encoded.k), Rows(*encoded.v)
        for mine, theirs in zip(runner.history_rows(request, layer), judged, strict=True):
            same = (mine.packed == theirs.packed).all(-1) & (mine.meta == theirs.meta).all(-1)
            equal, rows = equal + int(same.sum()), rows + same.numel()
    elements = len(fitted.layers) * 2 * document.k[0].numel()
    bits = {"server": runner.pool.stats()["bits_per_element"], "eval": 8 * encoded_bytes / elements}
    print(json.dumps({"codec": fitted.codec, "equal": equal / rows, "bits": bits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
