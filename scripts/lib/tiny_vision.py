"""What a tiny model of pictures needs beside its weights: words, a chat template, a processor."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np

from .tiny_models import PATCH, SPECIAL, VOCAB

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
