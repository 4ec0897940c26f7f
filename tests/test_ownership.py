"""Random pool operations: attention reads its own tokens, exactly those that should be exact.

The full form: ``OSCAR_OWNERSHIP=10000x50 pytest tests/test_ownership.py -k seeds -s`` (pages of one
token; larger pages walk a tenth of it).
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.pool_machine import Machine, report

pytestmark = pytest.mark.sglang
OPERATIONS, SEEDS = map(int, os.environ.get("OSCAR_OWNERSHIP", "400x6").split("x"))
# Page size and codec -> share of the walk; a page larger than a window needs longer, slower
# requests.
PAGES = {1: 1, 16: 0.5, 64: 0.2, 128: 0.1, "omni": 0.1, "position": 0.5}


@settings(max_examples=35, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    operations=st.lists(st.sampled_from(sorted(set(Machine.OPERATIONS))), min_size=5, max_size=60),
    seed=st.integers(0, 2**16),
    cache_rows=st.sampled_from((1, 7, 64)),
    page=st.sampled_from((1, 2, 16)),
    n_sink=st.sampled_from((4, 20)),
    park=st.booleans(),
)
def test_any_order_of_operations(operations, seed, cache_rows, page, n_sink, park):
    machine = Machine(seed, cache_rows, page=page, n_sink=n_sink, park=park)
    for name in operations:
        machine.do(name)
    machine.check_idle()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("page", PAGES)
def test_seeds(page):
    machines = []
    for seed in range(max(2, round(SEEDS * PAGES[page]))):
        rows = random.Random(seed).choice((3, 24, 400))
        more = dict(n_sink=(4, 20)[seed % 2], park=seed % 2 == 1)
        if isinstance(page, str):  # omni: pages of a block, 128 tokens
            machine = Machine(seed, rows, codec_name=page, **more)
        else:
            machine = Machine(seed, rows, page=page, **more)
        machine.run(OPERATIONS)
        machine.check_idle()
        machines.append(machine)
    counts = report(machines)
    print(f"page size {page}, {len(machines)} seeds: {counts}")
    if page not in (1, "position"):  # of a ring of 8 a cached prefix's whole pages leave little
        del counts["windows_taken"]
    assert min(counts.values()) > 0, f"the walk did not reach everything: {counts}"
