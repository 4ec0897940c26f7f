"""Model families through SGLang's own model code: int2 with wide windows is SGLang's own cache."""

from __future__ import annotations

import pytest

from oscar_sglang.kernels.layout import SUPPORTED_HEAD_DIMS, HistoryLayout
from scripts.lib.tiny_models import FAMILIES, head_dim
from tests.support.runner import result_of

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return result_of("model_parity", tmp_path_factory.mktemp("families"), *FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(results, name):
    result = results[name]
    assert "error" not in result, result["error"]
    assert min(result["scale"]) > 0.01, "flat logits would prove nothing"
    # float32 all along; the windows hold rotated rows.
    assert max(result["wide"]) < 1e-4, result["wide"]
    # Fresh prompts are exact, the rest reads codes: another answer, but a related one.
    assert max(result["narrow"][:2]) < 1e-4
    assert 1e-4 < max(result["narrow"]) < 2, result["narrow"]
    pool, dim = result["pool"], head_dim(name)
    assert (pool["layers"], pool["heads"], pool["dim"]) == (2, 2, dim)
    assert pool["bits_per_element"] == HistoryLayout(2, dim).bits_per_element
    assert pool["bytes"] == pool["planned_bytes"]


def test_families_cover_the_head_dims_of_real_models():
    dims = set(map(head_dim, FAMILIES))
    assert {64, 128, 256} <= dims <= set(SUPPORTED_HEAD_DIMS)
