"""Random pool operations: attention reads its own tokens, exactly those that should be exact.

The full form: ``OSCAR_OWNERSHIP=10000x50 pytest tests/test_ownership.py -k seeds -s``.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_machine import Machine, report

pytestmark = pytest.mark.sglang
OPERATIONS, SEEDS = map(int, os.environ.get("OSCAR_OWNERSHIP", "400x6").split("x"))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    operations=st.lists(st.sampled_from(sorted(set(Machine.OPERATIONS))), min_size=5, max_size=60),
    seed=st.integers(0, 2**16),
    cache_rows=st.sampled_from((1, 7, 64)),
)
def test_any_order_of_operations(operations, seed, cache_rows):
    machine = Machine(seed, cache_rows)
    for name in operations:
        machine.do(name)
    machine.check_idle()


@pytest.mark.timeout(0)
def test_seeds():
    machines = []
    for seed in range(SEEDS):
        machine = Machine(seed, cache_rows=random.Random(seed).choice((3, 24, 400)))
        machine.run(OPERATIONS)
        machine.check_idle()
        machines.append(machine)
    counts = report(machines)
    print(counts)
    assert min(counts.values()) > 0, f"the walk did not reach everything: {counts}"
