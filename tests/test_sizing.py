"""Running requests and memory parts chosen at start-up."""

from __future__ import annotations

import pytest

from oscar_sglang.config import OscarConfig
from oscar_sglang.pool.memory_log import block
from oscar_sglang.pool.sizing import make_plan

GB = 1 << 30
QWEN3_8B = dict(layers=36, kv_heads=8, head_dim=128, itemsize=2)


def plan(budget_gb, requests=None, tokens=None, **options):
    return make_plan(
        OscarConfig(codec="feedback", **options),
        **QWEN3_8B,
        budget_bytes=int(budget_gb * GB),
        max_running_requests=requests,
        device="cuda",
        context_length=40960,
        max_total_tokens=tokens,
    )


def per_request(p):
    """Bytes that grow with running requests, without the padding row."""
    return (p.window_bytes + p.sink_cache_bytes) / p.rows


@pytest.mark.parametrize("budget, requests", [(0.5, 4), (1.5, 8), (6, 12), (55, 111), (400, 256)])
def test_default_requests_of_qwen3_8b(budget, requests):
    """448 x 147456 B = 66 MB a request: few on a small budget, an eighth of a large one."""
    p = plan(budget)
    assert p.rows - 1 == requests
    share = (p.window_bytes + p.sink_cache_bytes) / (budget * GB)
    assert share < (0.15 if budget > 5 else 0.6)


def test_a_named_number_is_taken():
    assert plan(1, requests=77).rows == 78


def test_more_requests_than_the_tokens_can_serve_get_no_windows():
    """--max-total-tokens 8192 feeds 25 requests of 320 exact tokens."""
    assert plan(100, tokens=8192).rows - 1 == 25
    assert plan(100, tokens=100).rows - 1 == 1
    assert plan(100, tokens=10**7).rows - 1 == 203


def test_a_block_codec_pays_for_a_ring_that_ends_at_a_block():
    """256 exact tokens whatever is left of the last block: 127 rows more a request."""
    p = make_plan(
        OscarConfig(codec="omni"), **QWEN3_8B, budget_bytes=55 * GB, max_running_requests=8,
        device="cuda", context_length=40960,
    )  # fmt: skip
    assert p.windows.n_recent == 256 + 127 and p.history.block == 128
    assert p.window_bytes == 36 * 9 * (64 + 383) * 8 * 2 * 128 * 2
    # The allocator's slots, K and V codes, a norm and V's step and lo, and channels of a page.
    assert p.history_bytes(10 * 128) == 36 * 8 * 10 * (128 * (64 + 6) + 128 * 4)


def test_a_fixed_sink_cache_is_not_charged_to_requests():
    assert plan(55, sink_cache_tokens=1000).rows > plan(55).rows


@pytest.mark.parametrize("budget, requests, parked", [(55, 16, 16), (55, 64, 39), (1, 8, 0)])
def test_parked_rows_are_as_many_as_requests_and_cheap(budget, requests, parked):
    """45 MB a row of 320 exact tokens; at most a 32nd of the memory."""
    p = plan(budget, requests, prefix_window="park")
    assert (p.requests, p.parked_rows, p.rows) == (requests, parked, requests + parked + 1)
    row = 36 * 320 * 8 * 2 * 128 * 2
    assert p.window_bytes == row * p.rows and parked * row <= budget * GB / 32
    assert plan(budget, requests, prefix_window="park", parked_rows=5).parked_rows == 5
    assert plan(budget, requests).parked_rows == 0


@pytest.mark.parametrize(
    "budget, requests, tokens, rows",
    [
        *((54, 32, None, 4096), (54, 2, None, 3932), (1, 2, None, 256)),
        *((54, 2, 8000, 1000), (54, 2, 1000, 256), (54, 32, 1000, 1000), (54, 1, 10, 64)),
    ],
)
def test_default_sink_cache(budget, requests, tokens, rows):
    """Two prefixes a request, or a hundredth of the memory but not of few tokens."""
    assert plan(budget, requests, tokens).sink_cache_rows == rows


def test_log_block_tells_every_part():
    p = plan(55, requests=32)
    parts = {"history": 50 * GB, "windows": p.window_bytes, "sink_cache": p.sink_cache_bytes}
    parts |= {"scratch": GB // 2, "codec": 0, "workspace": 0}
    total = sum(parts.values())
    tokens = 50 * GB // p.bytes_per_token
    text = "\n".join(block(p, tokens, parts, total, "feedback", "abc123", (20, 21)))
    for name, size in parts.items():
        assert f"{name} {size / GB:.3f} GB" in text
    ratio = tokens / (total // p.bf16_bytes_per_token)
    assert 6.5 < ratio < 7.1
    for word in (
        *(f"{tokens} tokens held", f"{ratio:.2f}x", "artifact abc123", "codec feedback"),
        *("hooks 20/21", "2.25 bits", f"total {total / GB:.3f} GB", "up to 32 running requests"),
        *(f"above {tokens // 32} tokens", f"from {p.break_even()} tokens"),
    ):
        assert word in text, word
