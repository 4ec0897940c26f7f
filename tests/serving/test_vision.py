"""Text and pictures over HTTP: as transformers answers, on prefix hits of a picture too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oscar_sglang.calibration import Plan, calibrate
from scripts.lib.tiny_models import family
from scripts.lib.tiny_vision import data_url, picture, with_processor
from tests.support.server import Server

pytestmark = pytest.mark.sglang
STEPS = 4
# Windows that hold everything, of requests and behind the prefix cache: no code is ever read.
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", "int2")
FLAGS += ("--oscar-sink-tokens", "256", "--oscar-recent-tokens", "256")
FLAGS += ("--oscar-sink-cache-tokens", "1088", "--oscar-prefix-window", "reuse")
FLAGS += ("--max-total-tokens", "1024", "--max-running-requests", "2", "--enable-cache-report")
FLAGS += ("--image-processor-backend", "pil")  # the other needs the real torchvision


def say(*parts) -> dict:
    """A message of words and pictures, as transformers takes it."""
    kinds = {str: "text"}
    content = [{"type": kinds.get(type(p), "image"), kinds.get(type(p), "image"): p} for p in parts]
    return {"role": "user", "content": content}


A, B = picture(0), picture(1, 48, 64)
CHATS = {
    "cold": [say("5 6", A, "7 8 9")],
    "again": [say("5 6", A, "7 8 9")],
    "another picture": [say("5 6", B, "7 8 9")],
    "turn": [say("5 6", A, "7 8 9"), say("10 11", B, "12")],
}


class Reference:
    """transformers on the same chats."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.processor = AutoProcessor.from_pretrained(folder, use_fast=False)

    @torch.no_grad()
    def answer(self, chat: list[dict]) -> torch.Tensor:
        """Log-probabilities of the first ``STEPS`` greedy tokens: [STEPS, vocab]."""
        inputs = self.processor.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_tensors="pt"
        )
        found = self.model.generate(
            **inputs,
            **dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False),
            **dict(output_logits=True, return_dict_in_generate=True, eos_token_id=None),
        )
        return torch.cat(found.logits).log_softmax(-1)


def over_http(server: Server, chat: list[dict]) -> tuple[torch.Tensor, dict]:
    """Log-probabilities of each step's best tokens [STEPS, 8], and what the prompt consisted of."""
    messages = [
        message
        | {
            "content": [
                part
                if part["type"] == "text"
                else {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
                for part in message["content"]
            ]
        }
        for message in chat
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": STEPS, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 8, "ignore_eos": True}
    reply = server.request("/v1/chat/completions", body)
    steps = reply["choices"][0]["logprobs"]["content"]
    best = torch.tensor([[t["logprob"] for t in step["top_logprobs"]] for step in steps])
    return best, reply["usage"]["prompt_tokens_details"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    model = with_processor(family("qwen3-vl", folder / "model", sharp=True))
    reference = Reference(model)
    expected = {name: reference.answer(chat) for name, chat in CHATS.items()}
    artifact = folder / "made.safetensors"
    calibrate(Plan(model, tokens=512)).save(artifact)
    flags = (*FLAGS, "--oscar-artifact", str(artifact))
    with Server(model, folder / "server.log", *flags) as server:
        found = {name: over_http(server, chat) for name, chat in CHATS.items()}
        state = server.state()
    return expected, found, state


@pytest.mark.parametrize("chat", CHATS)
def test_as_transformers(answers, chat):
    expected, found, _ = answers
    best = expected[chat].topk(8).values
    assert (found[chat][0] - best).abs().max() < 1e-4
    assert best.std() > 0.1, "flat answers would prove nothing"


def test_hits_are_of_the_same_picture(answers):
    expected, found, state = answers
    cached = {name: usage["cached_tokens"] for name, (_, usage) in found.items()}
    pictures = {name: usage["image_tokens"] for name, (_, usage) in found.items()}
    assert pictures == {"cold": 12, "again": 12, "another picture": 12, "turn": 24}
    words = 3  # before the picture, and the token that begins it
    assert cached["cold"] == 0 and cached["another picture"] <= words
    assert cached["again"] >= words + 12 and cached["turn"] >= words + 12
    assert (expected["cold"][0] - expected["another picture"][0]).abs().max() > 0.05
    assert state["calibration"] == "artifact"
