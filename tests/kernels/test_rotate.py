"""rotate_queries and join_prefix against the reference."""

import pytest
import torch

from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.rotate import join_prefix, rotate_queries

from .conftest import orthogonal, relative_rms

SHAPES = [(1, 2, 2, 64), (37, 6, 2, 128), (130, 4, 4, 32), (70, 4, 2, 256)]


@pytest.mark.parametrize("tokens, heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 5e-3), (torch.float16, 4e-4)])
def test_rotate_queries(device, tokens, heads, kv_heads, dim, dtype, tol):
    packed = torch.randn(tokens, heads + 3, dim, device=device, dtype=dtype)
    q, r = packed[:, 1 : heads + 1], orthogonal(kv_heads, dim, device)  # a view of qkv
    got = rotate_queries(q, r)
    want = codec.rotate(q.cpu(), r.cpu())
    assert got.shape == q.shape and got.dtype == q.dtype and got.is_contiguous()
    assert relative_rms(got.cpu(), want) < tol  # rounding; of BF16 the interpreter truncates
    if device.type == "cuda":  # all but ties are rounded as the exact result is
        assert (got == want.to(device, dtype)).float().mean() > 0.95
    exact = rotate_queries(q.float(), r)
    assert relative_rms(exact.cpu(), want) < 1e-5  # three TF32 passes


@pytest.mark.parametrize("tokens, heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_join_prefix(device, tokens, heads, kv_heads, dim, dtype):
    """The union of both sides in the model's basis; either side may be empty and hold anything."""
    r = orthogonal(kv_heads, dim, device)
    part, fresh = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    part_lse, fresh_lse = (torch.randn(tokens, heads) * 4 for _ in range(2))
    back = codec.rotate(part, r.cpu().transpose(-1, -2))
    want = reference.merge(
        reference.Partial(back, part_lse), reference.Partial(fresh.float(), fresh_lse)
    ).out
    if tokens > 1:
        part_lse[0], part[0], want[0] = -torch.inf, torch.nan, fresh[0].float()
        fresh_lse[1], fresh[1], want[1] = -torch.inf, torch.nan, back[1]
        part_lse[2] = fresh_lse[2] = -torch.inf
        want[2] = 0
    out = torch.empty_like(fresh, device=device)
    transposed = part_lse.T.contiguous().to(device).T  # FA3 hands out [H, T]
    sides = part.to(device), transposed, fresh.to(device), fresh_lse.to(device)
    join_prefix(*sides, r, out)
    tol = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-4}[dtype]
    assert relative_rms(out.cpu(), want) < tol
