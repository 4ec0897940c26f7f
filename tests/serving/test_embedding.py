"""A causal model as an embedding model: prompts only, so nothing but long prompts reads codes."""

from __future__ import annotations

import json

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig

from oscar_sglang.config import OscarError
from oscar_sglang.plugin.refusals import refuse_model
from scripts.lib import tiny_models
from tests.support.server import Server

pytestmark = pytest.mark.sglang

FLAGS = ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--is-embedding"]
FLAGS += ["--max-total-tokens", "2000", "--max-running-requests", "2"]
# The third continues the first: cached tokens, and chunks that read the ones before.
PROMPTS = [list(range(1, 200)), [5] * 30, list(range(1, 200)) + [7] * 40]


def embeddings(model, log, *flags: str) -> torch.Tensor:
    with Server(model, log, *FLAGS, *flags, "--chunked-prefill-size", "64") as server:
        return torch.tensor(
            [server.request("/encode", {"input_ids": p})["embedding"] for p in PROMPTS]
        )


def test_embeddings_equal_those_of_sglangs_own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    model = tiny_models.llama(tmp_path / "model")
    stock = embeddings(model, tmp_path / "stock.log", "--attention-backend", "torch_native")
    wide = ("--kv-cache-dtype", "int2", "--oscar-recent-tokens", "512")
    assert (embeddings(model, tmp_path / "int2.log", *wide) - stock).abs().max() < 1e-4
    assert (stock[0] - stock[2]).abs().max() > 1e-2, "embeddings that are alike prove nothing"


@pytest.mark.parametrize(
    "kind, architecture",
    [("bert", "BertModel"), ("xlm-roberta", "XLMRobertaModel"), ("llama", "SDARForCausalLM")],
)
def test_models_that_look_ahead_are_refused(tmp_path, kind, architecture):
    config = {**tiny_models.LLAMA, "model_type": kind, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OscarError, match=f"{architecture} attends.*both directions.*drop --kv"):
        refuse_model(ModelConfig(str(tmp_path), is_embedding=True))


def test_a_noncausal_checkpoint_of_a_causal_class_is_refused(tmp_path):
    config = {**tiny_models.LLAMA, "is_causal": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OscarError, match="both directions"):
        refuse_model(ModelConfig(str(tmp_path)))
