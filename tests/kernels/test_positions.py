"""Codec ``position`` far into a context: a key is decoded as well at one position as at another."""

import pytest
import torch

from oscar_sglang.kernels import reference
from oscar_sglang.kernels.materialise import materialise
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import TokenBatch

CONTEXT = 131_072
HEADS, DIM = 2, 32


@pytest.mark.parametrize("codec_name", ["position", "position42"])
def test_error_does_not_depend_on_the_position(lab, device, codec_name):
    """Keys that are the position's mean times a share, plus the same rest in channels where the
    mean is 0: the same codes wherever they stand, so the same error within rounding."""
    x = lab(lens=(80,), kv_heads=HEADS, group=1, dim=DIM, n_sink=1, codec_name=codec_name)
    seg, params, rope = x.seg, x.seg.params[0], x.seg.spec.meta.rope
    seg.context = CONTEXT
    index = torch.tensor(rope.pairs, device=device)
    with_mean = torch.arange(DIM, device=device) % (DIM // 2) % 2 == 0  # of the pairs every other
    mean = torch.where(with_mean[index.argsort()], params.mean, 0.0)
    seg.params[0] = params = params._replace(mean=mean)
    some = torch.randint(1, CONTEXT, (25,))
    positions = torch.cat([torch.tensor([1, 15, 16, 4095, 65_536, CONTEXT - 1]), some]).unique()
    positions = positions.to(device)
    n = len(positions)
    share = params.grid[:, 0, 1] + 180 * params.grid[:, 0, 2]  # one that a byte holds
    rest = torch.randn(HEADS, DIM, device=device) * ~with_mean[index.argsort()]
    means = rope.mean_rows(mean, positions // 16).float()
    keys = (share[:, None] * means + rest).contiguous()
    slots = torch.arange(n, device=device) + 16
    nowhere = torch.full_like(slots, -1)
    where = TokenBatch(torch.ones_like(slots), positions, positions + CONTEXT, slots, nowhere)
    store(x.view(), where, keys, keys, torch.randn_like(keys), None, triton_only=True)

    k_rot = reference.rotate(keys, params.r_k)
    decoded, _ = reference.read_history(seg, 0, slots, positions)
    error = (decoded - k_rot).norm(dim=-1) / reference.rotate(rest[None], params.r_k).norm(dim=-1)
    assert (error > 0.01).all()
    assert (error.amax(0) - error.amin(0)).max() < 1e-3 * error.mean()
    rows = seg.history.read(0, slots)[0]
    assert (rows.packed == rows.packed[:1]).all() and (rows.meta == rows.meta[:1]).all()

    table = torch.zeros(3, CONTEXT, dtype=torch.int32, device=device)
    table[1, positions] = slots.int()
    out = torch.full((2, n, HEADS, DIM), float("nan"), device=device)
    ends = torch.full((n,), CONTEXT, device=device)
    ones = torch.ones(n, dtype=torch.int64, device=device)
    indptr = torch.arange(n + 1, device=device)
    materialise(x.view(), table, ones, positions, indptr, ends, 1, *out)
    assert torch.allclose(out[0], decoded, rtol=1e-4, atol=1e-5)
