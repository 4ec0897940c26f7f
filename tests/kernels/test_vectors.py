"""store meets the committed vector files code for code (float32 rows, so its Triton form)."""

import dataclasses

import numpy as np
import pytest
import torch

from oscar_sglang.kernels import codec
from oscar_sglang.kernels.codec import RangeRule
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import TokenBatch
from tests.support import vectors


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "name,packed", [("feedback", "packed_feedback"), ("aligned", "packed_plain")]
)
def test_vector_files(lab, d, name, packed):
    vec = vectors.load(d)
    x = lab(lens=(8,), kv_heads=1, group=1, dim=d, codec_name=name)

    def matrix(a):
        return torch.tensor(a, dtype=torch.float32, device=x.device)[None].contiguous()

    factor = matrix(vectors.feedback_factor(vec.metric)) if name == "feedback" else None
    x.seg.params[0] = codec.LayerParams(matrix(vec.rotation), matrix(vec.rotation), factor)
    x.seg.specs = [dataclasses.replace(x.seg.spec, k_range=RangeRule("shrink", 0.75))]
    k = matrix(vec.k)[0][:, None].contiguous()
    position = torch.arange(len(k), device=x.device)
    slots = x.req_to_token[1, : len(k)].long()
    ends, none = torch.full_like(position, len(k)), torch.full_like(position, -1)
    tokens = TokenBatch(torch.ones_like(position), position, ends, slots, none)
    store(x.view(), tokens, k, k, k, None)
    rows, _ = x.seg.history.read(0, slots)
    assert rows.meta[:, 0, 0].tolist() == vec.expected["scale_fp16"]
    assert rows.meta[:, 0, 1].tolist() == vec.expected["lo_fp16"]
    found = codec.unpack(rows.packed)[:, 0].cpu().numpy()
    assert np.array_equal(found, vectors.codes(vec.expected[packed]))
