"""The block that the start-up log shows about the 2-bit cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.layout import MemoryPlan

_GB = 1 << 30


def block(
    plan: MemoryPlan,
    tokens: int,
    parts: dict[str, int],
    planned: int,
    codec: str,
    artifact: str,
    hooks: tuple[int, int],
) -> Iterator[str]:
    """Lines of the block.

    tokens   held by the cache                    planned  bytes the memory profile counted on
    parts    bytes really allocated, by name      hooks    in place, and in all
    """
    total = sum(parts.values())
    sizes = ", ".join(f"{name} {size / _GB:.3f} GB" for name, size in parts.items())
    in_bf16 = total // plan.bf16_bytes_per_token
    yield (
        f"{tokens} tokens held, {tokens / max(in_bf16, 1):.2f}x the {in_bf16} of a BF16 cache in "
        f"the same memory; codec {codec}, artifact {artifact}, hooks {hooks[0]}/{hooks[1]}"
    )
    yield f"{sizes}; total {total / _GB:.3f} GB (planned {planned / _GB:.3f} GB)"
    ratio = plan.bf16_bytes_per_token / plan.bytes_per_token
    yield (
        f"{plan.bytes_per_token} B/token against {plan.bf16_bytes_per_token} B in BF16 "
        f"({ratio:.2f}x), {plan.bits_per_element:.2f} bits, with the exact windows "
        + ", ".join(f"{plan.effective_bits(n):.2f} at {n}" for n in (8192, 131072))
        + " tokens"
    )
    requests = plan.requests
    parked = f" and of {plan.parked_rows} that left" if plan.parked_rows else ""
    cost = plan.window_bytes + plan.sink_cache_bytes
    yield (
        f"up to {requests} running requests: their exact windows{parked} (sink "
        f"{plan.windows.n_sink}, recent {plan.windows.n_recent}) and sink cache cost "
        f"{cost / _GB:.3f} GB, as much as {cost // plan.bytes_per_token} tokens of history. "
        f"Contexts above {tokens // requests} "
        "tokens are limited by tokens: lower --max-running-requests to hold more; shorter ones by "
        f"requests: raise it. A request is smaller than in BF16 from {plan.break_even()} tokens"
    )
