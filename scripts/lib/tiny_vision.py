"""Tiny models of pictures: what they need beside weights (words, a chat template, a processor), and
formats that keep their language model as a part of another."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .tiny_models import COMMON, PATCH, SPECIAL, VISION, VISION_IDS, VOCAB, family, mrope, write

_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ ' ' + m.content }}{% else %}"
    "{% for part in m.content %}{% if 'image' in part.type %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ ' ' + part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def with_processor(folder: Path) -> Path:
    """A tokenizer that calls every token by its number, and Qwen-VL's processor of pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = {f"▁{i}": i for i in range(VOCAB - len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(words | SPECIAL, unk_token="▁0"))
    # SGLang looks for a picture's tokens in the text of its ids: no blanks of our own between them.
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    architecture = json.loads((folder / "config.json").read_text())["model_type"]
    processor = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[architecture]
    pixels = dict(
        size={"shortest_edge": 256, "longest_edge": 65536},
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        image_processor_type="Qwen2VLImageProcessor",
        processor_class=processor,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    video = pixels | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def picture(seed: int, width: int = 64, height: int = 48):
    """Noise, the same every time."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def omni(folder: Path) -> Path:
    """Qwen3-Omni without its talker; of the thinker's audio and vision parts the smallest."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    rope = mrope(12, 10, 10, mrope_interleaved=True)
    vision = dict(
        VISION, out_hidden_size=128, num_position_embeddings=64, deepstack_visual_indexes=[0]
    )
    audio = dict(encoder_layers=1, d_model=64, encoder_attention_heads=2, encoder_ffn_dim=64)
    thinker = dict(
        text_config={**COMMON, **experts, "head_dim": 64, "rope_parameters": rope},
        vision_config=vision,
        audio_config={**audio, "downsample_hidden_size": 32, "output_dim": 128},
        audio_token_id=3,
        **VISION_IDS,
    )
    thinker.pop("vision_end_token_id")
    config = AutoConfig.for_model("qwen3_omni_moe", thinker_config=thinker)
    config.enable_audio_output = False
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    torch.manual_seed(0)
    write(AutoModelForImageTextToText.from_config(config.thinker_config), folder)
    _prefix(folder, "thinker.")
    config.save_pretrained(folder)
    return folder


def internvl(folder: Path) -> Path:
    """InternVL's own format around a Qwen3. Its vision part has no weights: for text alone."""
    family("qwen3", folder)
    vision = dict(
        architectures=["InternVisionModel"],
        model_type="intern_vit_6b",
        norm_type="layer_norm",
        hidden_act="gelu",
        qkv_bias=True,
        qk_normalization=False,
        use_flash_attn=False,
        layer_norm_eps=1e-6,
        initializer_range=0.02,
        initializer_factor=1.0,
        **dict(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64),
        **dict(image_size=28, patch_size=14),
        **dict.fromkeys(("drop_path_rate", "dropout", "attention_dropout"), 0.0),
    )
    config = dict(
        architectures=["InternVLChatModel"],
        model_type="internvl_chat",
        llm_config=json.loads((folder / "config.json").read_text()),
        vision_config=vision,
        template="internvl2_5",
        ps_version="v2",
        downsample_ratio=0.5,
        select_layer=-1,
        force_image_size=28,
        **dict(dynamic_image_size=True, use_thumbnail=True),
        **dict(min_dynamic_patch=1, max_dynamic_patch=12),
    )
    (folder / "config.json").write_text(json.dumps(config))
    _prefix(folder, "language_model.")
    return folder


def _prefix(folder: Path, prefix: str) -> None:
    file = folder / "model.safetensors"
    weights = {n if n.startswith(prefix) else prefix + n: w for n, w in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


# Name -> maker, and the channels of a head.
WRAPPED = {"qwen3-omni": (omni, 64), "internvl": (internvl, 128)}
