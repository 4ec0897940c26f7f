"""Recalibrates a bare runner that has another model's artifact; prints what it found, as JSON.

python -m tests.runners.recalibrate_parity MODEL OTHER_MODEL
"""

import json
import sys
from pathlib import Path

import torch

from oscar_sglang.calibration import Plan, calibrate
from oscar_sglang.calibration.collect import collect, load_model
from oscar_sglang.calibration.fit import fit_layer, k_error, v_error
from oscar_sglang.plugin import recalibrate
from scripts.lib.inprocess import Runner

CODEC, TOKENS, LONGEST = "compact", 2048, 1024

model, other = Path(sys.argv[1]), Path(sys.argv[2])
artifact = calibrate(Plan(other, "random:1024", TOKENS), CODEC)
artifact.fingerprint = type(artifact.fingerprint).of(model)  # as after an update of the weights
path = model.parent / "other.st"
artifact.save(path)
runner = Runner(model, path, max_total_tokens=1500)
pool, prefills, prefill = runner.pool, [], recalibrate._prefill
addresses = [t.data_ptr() for p in pool.segments.params for t in p if t is not None]


def recorded(runner, pool, ids):
    prefills.append(ids.clone())
    prefill(runner, pool, ids)


recalibrate._prefill = recorded
found = recalibrate.gather_and_fit(runner.runner, pool, longest=LONGEST, tokens=TOKENS)
before = [p._replace(r_k=p.r_k.clone()) for p in pool.segments.params]
grids = pool.segments.grids.clone()
pool.replace_params(found.params)

exact = load_model(model, "cpu")
sequences = prefills[1::2]
moments = collect(exact, sequences)
spec = pool.segments.spec


def errors(layers) -> list[float]:
    parts = [
        torch.cat([k_error(spec, p, m), v_error(spec, p, m)])
        for p, m in zip(layers, moments, strict=True)
    ]
    return torch.stack(parts).flatten().tolist()


def surprise(ids: torch.Tensor) -> float:
    """Mean negative log-probability of a sequence's tokens, nats."""
    with torch.no_grad():
        shares = exact(ids[None]).logits[0, :-1].log_softmax(-1)
    return float(-shares.gather(1, ids[1:, None]).mean())


print(
    json.dumps(
        {
            "lengths": [len(ids) for ids in prefills],
            "repeated": all(bool((s[:512] == s[512:]).all()) for s in sequences),
            "surprise": surprise(sequences[0][:512]),
            "surprise of random ids": surprise(prefills[0]),
            "live": errors(pool.segments.params),
            "independent": errors([fit_layer(m, CODEC).params for m in moments]),
            "other": errors(artifact.layers),
            "same tensors": addresses
            == [t.data_ptr() for p in pool.segments.params for t in p if t is not None],
            "grids follow": bool((grids != pool.segments.grids).any())
            and torch.equal(pool.segments.grids, torch.stack([p.grid for p in found.params])),
            "rotations changed": all(
                not torch.equal(a.r_k, b.r_k)
                for a, b in zip(before, pool.segments.params, strict=True)
            ),
            "warnings": found.warnings,
            "observer": pool.observer is None,
            "free rows": len(runner.req_pool.free_slots),
        }
    )
)
