"""One owner of a rank's set-up: what it reads and builds, and that the plan is the pool's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact import header
from oscar_sglang.config import OscarConfig, OscarError
from oscar_sglang.plugin import rank

LAYERS, HEADS, D, GIB = 4, 2, 16, 2**30


class Attention:
    """In place of the kernels', which need a GPU: buffers that grow with the batch."""

    built: list[Attention] = []

    def __init__(self, *, max_batch: int, **options) -> None:
        self.num_bytes, self.options = 1000 * max_batch, options
        self.built.append(self)


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """What a rank on a GPU reads of SGLang, our options, and the reads of artifacts' headers."""
    fingerprint = art.Fingerprint("LlamaForCausalLM", LAYERS, 2, HEADS, D, "{}", "{}", "0")
    art.data_free(fingerprint).save(tmp_path / "a.safetensors")
    config = OscarConfig(codec="feedback", artifact=str(tmp_path / "a.safetensors"))
    schedule = SimpleNamespace(max_running_requests=8, max_total_tokens=None, page_size=16)
    model = SimpleNamespace(
        get_num_kv_heads=lambda ranks: HEADS, head_dim=D, context_len=4096, num_attention_heads=4
    )
    kvc = SimpleNamespace(
        server_args=SimpleNamespace(kv_cache_dtype=config.dtype),
        model_config=model,
        model_dtype=torch.bfloat16,
        device="cuda",
        attn_dp_size=1,
        mambaish_config=None,
        layer_info=SimpleNamespace(start_layer=0, end_layer=LAYERS),
    )
    reads, original = [], header._read_raw
    monkeypatch.setattr(header, "_read_raw", lambda path: reads.append(path) or original(path))
    monkeypatch.setattr(Attention, "built", [])
    monkeypatch.setattr("oscar_sglang.kernels.decode.DecodeAttention", Attention)
    parallel = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    found = SimpleNamespace(kvc=kvc, reads=reads, config=config)
    monkeypatch.setattr(rank, "config_of", lambda args: found.config)
    return found


def test_everything_is_read_and_built_once(sglang):
    mine = rank.Rank(sglang.kvc, GIB)
    (attention,) = Attention.built
    assert mine.plan.rows == 9 and mine.plan.workspace_bytes == attention.num_bytes == 8000
    assert mine.token_bytes() == GIB - mine.plan.fixed_bytes
    assert mine.bytes_per_token() == mine.plan.bytes_per_token
    assert mine.limit_requests(100) == 8 and mine.limit_requests(3) == 3
    setup = mine.pool_setup()
    assert setup.plan is mine.plan and setup.plan.rows == 4
    assert setup.decode_attention is attention and setup.layer_ids == (0, 1, 2, 3)
    assert len(sglang.reads) == 1 and Attention.built == [attention]
    assert attention.options["page_size"] == 16 and attention.options["heads"] == 4


def test_tags_are_paid_for_on_a_gpu_only(sglang):
    plain = rank.Rank(sglang.kvc, GIB)
    sglang.config = replace(sglang.config, debug_tags=True)
    assert rank.Rank(sglang.kvc, GIB).bytes_per_token() == plain.plan.bytes_per_token + 32
    sglang.kvc.device = "cpu"
    on_cpu = rank.Rank(sglang.kvc, GIB)
    assert on_cpu.bytes_per_token() == on_cpu.plan.bytes_per_token and on_cpu.attention is None


def test_too_little_memory_names_the_ways_out(sglang):
    with pytest.raises(OscarError, match="8 running requests.*lower --max-running-requests"):
        rank.Rank(sglang.kvc, 2**20).token_bytes()


def test_an_artifact_that_is_named_is_read_once_at_start_up(sglang, monkeypatch):
    from oscar_sglang.plugin import startup

    monkeypatch.setattr(startup, "refuse_unknown", lambda view: None)
    monkeypatch.setattr(startup, "refuse_options", lambda view: None)
    config = replace(sglang.config, codec=None)
    chosen = startup.choose(SimpleNamespace(page_size=None, device="cuda"), config)
    assert chosen.codec == "feedback" and chosen.page_size == 16 and len(sglang.reads) == 1
    with pytest.raises(OscarError, match="no such file"):
        startup.choose(SimpleNamespace(page_size=None, device="cuda"), OscarConfig(artifact="no"))
