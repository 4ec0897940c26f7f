"""Model families through SGLang's own model code: int2 with wide windows is SGLang's own cache."""

from __future__ import annotations

import pytest

from oscar_sglang.kernels.layout import (
    PADDED_HEAD_DIMS,
    SUPPORTED_HEAD_DIMS,
    HistoryLayout,
    stored_head_dim,
)
from scripts.lib.tiny_models import FAMILIES, head_dim
from scripts.lib.tiny_vision import WRAPPED
from tests.support.runner import result_of

pytestmark = pytest.mark.sglang
DIMS = {name: head_dim(name) for name in FAMILIES} | {name: d for name, (_, d) in WRAPPED.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return result_of("model_parity", tmp_path_factory.mktemp("families"), *DIMS)


@pytest.mark.parametrize("name", DIMS)
def test_family(results, name):
    result = results[name]
    assert "error" not in result, result["error"]
    assert min(result["scale"]) > 0.01, "flat logits would prove nothing"
    # float32 all along; the windows hold rotated rows.
    assert max(result["wide"]) < 1e-4, result["wide"]
    # Fresh prompts are exact, the rest reads codes: another answer, but a related one.
    assert max(result["narrow"][:2]) < 1e-4
    assert 1e-4 < max(result["narrow"]) < 2, result["narrow"]
    pool, dim = result["pool"], DIMS[name]
    assert (pool["layers"], pool["heads"], pool["dim"]) == (2, 2, dim)
    channels = stored_head_dim(dim)
    bits = HistoryLayout(2, channels).bits_per_element * channels / dim
    assert pool["bits_per_element"] == pytest.approx(bits)
    assert pool["bytes"] == pool["planned_bytes"]


def test_families_cover_the_head_dims_of_real_models():
    dims = set(DIMS.values())
    assert {64, 96, 128, 256} <= dims <= {*SUPPORTED_HEAD_DIMS, *PADDED_HEAD_DIMS}
