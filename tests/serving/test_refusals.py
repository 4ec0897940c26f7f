"""Whatever int2 cannot serve stops the launcher before weights load, with the way out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from oscar_sglang.artifact import file as artifact
from scripts.lib.tiny_models import LLAMA
from tests.support import forks
from tests.support.fork_server import CRASHED

pytestmark = pytest.mark.sglang

MODELS = {
    "llama": LLAMA,
    "head48": {**LLAMA, "head_dim": 48},
    "window": {
        **LLAMA,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": 128,
    },
    "gemma": {
        **LLAMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 128,
        "query_pre_attn_scalar": 64,
    },
    "gpt-oss": {
        **LLAMA,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **dict(d_model=128, encoder_attention_heads=4, decoder_attention_heads=4),
        **dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128),
    },
    "hybrid": {
        **LLAMA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "short convolution": {
        **LLAMA,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
    },
    "lightning": {
        **LLAMA,
        "architectures": ["JetNemotronForCausalLM"],
        "model_type": "jet_nemotron",
        "layer_types": ["jet", "attn"],
        "efficient_attention_config": {},
    },
    "kimi": {
        **LLAMA,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": {
            **dict(kda_layers=[1], full_attn_layers=[2], num_heads=2, head_dim=32),
            "short_conv_kernel_size": 4,
        },
    },
    "mla": {
        **LLAMA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 64,
    },
}
# name -> (model, artifact, extra arguments, environment, words of the message)
CASES = {
    "truncated artifact": ("llama", "truncated", (), {}, ["truncated", "calibrate"]),
    "not an artifact": ("llama", "text", (), {}, ["text.safetensors", "calibrate"]),
    "strict thinking on a CPU": (
        *("llama", "good", ("--enable-strict-thinking", "--reasoning-parser", "qwen3"), {}),
        ["--enable-strict-thinking", "drop it"],
    ),
    "missing artifact": ("llama", "nowhere", (), {}, ["nowhere", "calibrate"]),
    "artifact among weights": ("llama", "llama/good", (), {}, ["weights", "another folder"]),
    "missing layer": ("llama", "no-layer-1", (), {}, ["layers.1", "calibrate"]),
    "another model's artifact": ("llama", "foreign", (), {}, ["kv_heads", "4", "2"]),
    "another codec's artifact": (
        "llama",
        "good",
        ("--oscar-codec", "oscar"),
        {},
        ["codec", "feedback", "oscar"],
    ),
    "head_dim 48": ("head48", "good", (), {}, ["head_dim 48", "supported: 16, 32, 64, 80"]),
    "sliding window": ("window", "good", (), {}, ["sliding-window", "drop --kv-cache-dtype"]),
    "hybrid sliding window": ("gemma", "good", (), {}, ["sliding-window"]),
    "local layers and sinks": ("gpt-oss", "good", (), {}, ["sliding-window", "drop --kv-cache"]),
    "cross attention": ("whisper", "good", (), {}, ["encoder-decoder", "drop --kv-cache-dtype"]),
    "MLA": ("mla", "good", (), {}, ["MLA", "drop --kv-cache-dtype"]),
    "HiCache": ("llama", "good", ("--enable-hierarchical-cache",), {}, ["drop --enable-hier"]),
    "disaggregation": (
        "llama",
        "good",
        ("--disaggregation-mode", "prefill"),
        {},
        ["drop --disaggregation-mode"],
    ),
    "speculation": (
        "llama",
        "good",
        ("--speculative-algorithm", "NGRAM"),
        {},
        ["drop --speculative-algorithm"],
    ),
    "pipeline parallelism": ("llama", "good", ("--pp-size", "2"), {}, ["drop --pp-size"]),
    "captured prefill": (
        "llama",
        "good",
        ("--cuda-graph-backend-prefill", "full"),
        {},
        ["--cuda-graph-backend-prefill full", "disabled"],
    ),
    "captured prefill in JSON": (
        "llama",
        "good",
        ("--cuda-graph-config", '{"prefill": {"backend": "full"}}'),
        {},
        ["--cuda-graph-backend-prefill full", "disabled"],
    ),
    "FlexKV": ("llama", "good", ("--enable-flexkv",), {}, ["drop --enable-flexkv"]),
    "prefix window": ("llama", "good", ("--oscar-prefix-window", "some"), {}, ["'some'", "reuse"]),
    "prefill library on a CPU": (
        "llama",
        "good",
        ("--oscar-prefill-attention", "flashinfer"),
        {},
        ["drop --oscar-prefill-attention flashinfer"],
    ),
    "SGLang's flag for it": (
        "llama",
        "good",
        ("--prefill-attention-backend", "flashinfer"),
        {},
        ["drop --prefill-attention-backend flashinfer", "--oscar-prefill-attention fa3|flashinfer"],
    ),
    "page size 24": ("llama", "good", ("--page-size", "24"), {}, ["--page-size 24", "16"]),
    "page size of a block codec": (
        "llama",
        "blocks",
        ("--page-size", "64"),
        {},
        ["--page-size 64", "omni", "--page-size 128"],
    ),
    "another norm than the artifact's": (
        "llama",
        "blocks",
        ("--oscar-omni-norm", "none"),
        {},
        ["norm head", "--oscar-omni-norm none", "drop"],
    ),
    "omni's norm for another codec's artifact": (
        "llama",
        "good",
        ("--oscar-omni-norm", "none"),
        {},
        ["holds codec feedback, asked for --oscar-omni-norm none", "drop"],
    ),
    "another codec's option": (
        "llama",
        "good",
        ("--oscar-codec", "oscar", "--oscar-omni-rotation", "none"),
        {},
        ["--oscar-omni-rotation belongs to codec omni"],
    ),
    "post-capture sizing": (
        "llama",
        "good",
        (),
        {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"},
        ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "unset"],
    ),
    "unknown kernels": (
        "llama",
        "good",
        (),
        {"OSCAR_SGLANG_KERNELS": "cute"},
        ["OSCAR_SGLANG_KERNELS", "'cute'", "triton"],
    ),
    "zero sink": ("llama", "good", ("--oscar-sink-tokens", "0"), {}, ["--oscar-sink-tokens"]),
    "negative recent": (
        "llama",
        "good",
        ("--oscar-recent-tokens", "-5"),
        {},
        ["--oscar-recent-tokens", "-5"],
    ),
    "other attention backend": (
        "llama",
        "good",
        ("--attention-backend", "triton"),
        {},
        ["drop --attention-backend triton"],
    ),
    "unknown codec": ("llama", "good", ("--oscar-codec", "zip"), {}, ["zip", "feedback"]),
    "unknown combination": (
        "llama",
        "good",
        ("--oscar-codec", "lloyd-compact"),
        {},
        ["lloyd-compact", "accurate-compact"],
    ),
    "codec of another artifact": (
        "llama",
        "good",
        ("--oscar-codec", "accurate"),
        {},
        ["holds codec 'feedback', asked for 'accurate'", "calibrate --codec accurate"],
    ),
}


def _write_artifacts(folder: Path, model: Path) -> None:
    fingerprint = artifact.Fingerprint.of(model)
    good = folder / "good.safetensors"
    artifact.data_free(fingerprint, "feedback").save(good)
    (model / "good.safetensors").write_bytes(good.read_bytes())
    artifact.data_free(fingerprint, "omni").save(folder / "blocks.safetensors")
    (folder / "truncated.safetensors").write_bytes(good.read_bytes()[:-1000])
    (folder / "text.safetensors").write_text("not an artifact" * 100)
    with safe_open(good, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys() if not k.startswith("layers.1.")}
        save_file(tensors, folder / "no-layer-1.safetensors", f.metadata())
    other = artifact.Fingerprint.of(model, {**LLAMA, "num_key_value_heads": 4})
    artifact.data_free(other, "feedback").save(folder / "foreign.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    _write_artifacts(folder, folder / "llama")

    def launch(name: str, model: str, env: dict[str, str], *flags: str) -> dict:
        log = folder / f"{name}.log"
        argv = ["--model-path", str(folder / model), "--device", "cpu", *flags]
        started = forks.start("oscar_sglang.launch_server", argv, {**os.environ, **env}, log)
        return {"code": started.wait(), "output": log.read_text()}

    found = {"flag without int2": launch("bare", "llama", {}, "--oscar-sink-tokens", "8")}
    for name, (model, file, extra, env, *_words) in CASES.items():
        flags = ["--kv-cache-dtype", "int2", "--skip-tokenizer-init"]
        flags += ["--oscar-artifact", str(folder / f"{file}.safetensors"), *extra]
        found[name] = launch(name.replace("/", " "), model, env, *flags)
    return found


@pytest.mark.parametrize("name", [*CASES, "flag without int2"])
def test_refused_before_weights_load(results, name):
    result = results[name]
    words = CASES[name][-1] if name in CASES else ["--kv-cache-dtype int2"]
    assert result["code"] not in (0, CRASHED), result["output"][-3000:]
    message = result["output"].strip().splitlines()[-1]
    for word in words:
        assert word in message, result["output"][-3000:]
    assert "Load weight" not in result["output"]


def test_other_hybrid_models_are_refused(tmp_path):
    """SGLang itself stops such models on a CPU, earlier and for another reason."""
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_sglang.config import OscarError
    from oscar_sglang.plugin.refusals import refuse_model

    def config(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODELS[name]))
        return ModelConfig(str(tmp_path / name))

    hybrid = config("hybrid")
    refuse_model(hybrid)
    refuse_model(config("short convolution"))
    with pytest.raises(OscarError, match="several GPUs.*drop --tp-size 2"):
        refuse_model(hybrid, tp_size=2)
    with pytest.raises(OscarError, match="not tested.*drop --kv-cache-dtype int2"):
        refuse_model(config("lightning"))
    with pytest.raises(OscarError, match="MLA attention.*drop --kv-cache-dtype int2"):
        refuse_model(config("kimi"))


QUANTISED = {
    "fp8": dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
    "awq": dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_nothing_to_the_cache(tmp_path, method):
    """Accepted, and the same model to an artifact; such weights themselves need a GPU."""
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_sglang.plugin.refusals import refuse_model

    plain = artifact.Fingerprint.of(tmp_path, LLAMA)
    config = {**LLAMA, "quantization_config": QUANTISED[method]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(str(tmp_path))
    assert model.quantization == method
    refuse_model(model)
    assert artifact.Fingerprint.of(tmp_path) == plain


def test_a_missing_hook_is_fatal(monkeypatch):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from oscar_sglang import hooks
    from oscar_sglang.config import OscarError
    from oscar_sglang.plugin import registration

    load_plugins()
    registration.verify()
    for hook in hooks.HOOKS:
        with monkeypatch.context() as m:
            m.setattr(HookRegistry, "_patched", HookRegistry._patched - {hook.target})
            with pytest.raises(OscarError, match=hook.target.replace(".", r"\.")):
                registration.verify()


def test_engine_refuses_too():
    """``Engine`` makes its arguments by this class; the rest is refused when they are resolved."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for options, words in (
        (dict(oscar_codek="feedback"), "oscar_codek"),
        (dict(oscar_sink_tokens=0), "--oscar-sink-tokens"),
        (dict(enable_hierarchical_cache=True), "drop --enable-hierarchical-cache"),
        (dict(kv_cache_dtype="int2?recent_tokens=0"), "--oscar-recent-tokens"),
        (dict(kv_cache_dtype="auto", oscar_codec="aligned"), "oscar_codec given without"),
    ):
        given = dict(model_path="/nowhere", device="cpu", kv_cache_dtype="int2") | options
        with pytest.raises(ValueError, match=words):
            Engine.server_args_class(**given).resolve_once()


def test_copies_of_the_arguments_keep_our_options():
    import copy
    import json
    import pickle

    import msgspec
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from oscar_sglang.plugin.seam import config_of

    load_plugins()
    args = Engine.server_args_class(
        model_path="/nowhere",
        kv_cache_dtype="int2",
        oscar_codec="aligned",
        oscar_recent_tokens=64,
        oscar_sink_tokens=32,
        oscar_artifact="/a b/c&d=e.safetensors",
        oscar_debug_tags=True,
    )
    wanted = config_of(args)
    assert (wanted.codec, wanted.recent_tokens, wanted.artifact) == (
        *("aligned", 64, "/a b/c&d=e.safetensors"),
    )
    through_json = json.loads(json.dumps(args.resolved_dict(), default=str))
    for copied in (
        msgspec.structs.replace(args, page_size=16),
        copy.deepcopy(args),
        pickle.loads(pickle.dumps(args)),
        ServerArgs(**msgspec.structs.asdict(args)),
        ServerArgs(model_path="/elsewhere", kv_cache_dtype=through_json["kv_cache_dtype"]),
    ):
        assert config_of(copied) == wanted
