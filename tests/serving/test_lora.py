"""LoRA adapters on an int2 cache: each answers as the model with its weights merged in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oscar_sglang.artifact import file as art
from scripts.lib.tiny_models import VOCAB, llama, lora_adapter, random_ids
from tests.support.server import Server

pytestmark = pytest.mark.sglang
# SGLang's LoRA code asks for pinned memory, which does not exist without a GPU: the server's
# processes start with these functions ignoring it.
UNPINNED = """
import torch
def unpinned(function):
    return lambda *args, pin_memory=False, **kwargs: function(*args, **kwargs)
for name in ("tensor", "empty", "zeros", "ones", "full"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args: self
"""


def exact(model: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def test_adapters_share_one_cache(tmp_path):
    model = llama(tmp_path / "model")
    art.data_free(art.Fingerprint.of(model), "feedback").save(tmp_path / "artifact.safetensors")
    folders = {None: model}
    for seed, name in enumerate(("one", "two")):
        folders[name] = tmp_path / f"merged-{name}"
        lora_adapter(model, tmp_path / name, folders[name], seed)
    (ids,) = (x.tolist() for x in random_ids(60))
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--oscar-artifact", str(tmp_path / "artifact.safetensors")]
    flags += ["--max-total-tokens", "1000", "--max-running-requests", "4", "--oscar-debug-tags"]
    flags += ["--oscar-prefix-window", "reuse"]  # else so short a prompt is never taken from it
    flags += ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths"]
    flags += [f"{name}={tmp_path / name}" for name in folders if name]
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(UNPINNED)
    path = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
    answers = {}
    with Server(model, tmp_path / "log", *flags, env={"PYTHONPATH": path}) as server:
        for turn in range(2):  # the second time the prompt's prefix is cached, per adapter
            for name in folders:
                got = server.generate(
                    ids, return_logprob=True, top_logprobs_num=VOCAB, lora_path=name
                )["meta_info"]
                assert (got["cached_tokens"] > 0) == (turn == 1)
                top = {token: value for value, token, *_ in got["output_top_logprobs"][0]}
                answers[name, turn] = torch.tensor([top[i] for i in range(VOCAB)])
        assert "OwnershipError" not in server.log.read_text()
    for name, folder in folders.items():
        # All 60 tokens lie in the exact windows, from the sink cache the second time.
        for turn in range(2):
            torch.testing.assert_close(answers[name, turn], exact(folder, ids), atol=1e-4, rtol=0)
    assert (answers["one", 0] - answers[None, 0]).abs().max() > 0.1, "the adapters must matter"
