"""materialise against the reference."""

import pytest
import torch

from oscar_sglang.kernels import reference
from oscar_sglang.kernels.materialise import materialise


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "dim,codec_name",
    [
        (32, "feedback"),
        (64, "feedback"),
        (32, "lloyd"),
        (64, "compact"),
        (64, "position"),
        (32, "position42"),
    ],
)
def test_ranges(lab, page, dim, codec_name):
    lens = (90, 10, 47)
    x = lab(lens=lens, dim=dim, page=page, n_sink=9, n_recent=19, codec_name=codec_name)
    x.fill(lens)
    starts, counts = [3, 0, 5], [80, 0, 33]
    ends = [x.hist_end(b, n) for b, n in enumerate(lens)]
    total = sum(counts)
    out_k = torch.full((total, x.kv_heads, dim), float("nan"), dtype=x.dtype, device=x.device)
    out_v = out_k.clone()
    indptr = torch.tensor([0, *counts]).cumsum(0)
    as_device = lambda t: torch.as_tensor(t, device=x.device)  # noqa: E731
    materialise(
        x.view(), x.req_to_token, x.rows, as_device(starts), as_device(indptr),
        as_device(ends), max(counts), out_k, out_v,
    )  # fmt: skip
    for b, (s, n) in enumerate(zip(starts, counts, strict=True)):
        want_k = torch.empty(n, x.kv_heads, dim, dtype=x.dtype, device=x.device)
        want_v = torch.empty_like(want_k)
        slots = x.req_to_token[b + 1, s : s + n].long()
        reference.materialise(x.seg, 0, b + 1, slots, s, ends[b], want_k, want_v)
        at = slice(int(indptr[b]), int(indptr[b + 1]))
        for got, want in ((out_k[at], want_k), (out_v[at], want_v)):
            # One rounding apart where the GPU fuses code * step + lo.
            assert torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-6)
            assert not got.is_cuda or n == 0 or (got == want).float().mean() > 0.99
