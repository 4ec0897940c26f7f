"""Pictures as a vision-language model reads them: its processor's tokens, patches and positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import CalibrationError

_WORDS = "Describe in detail what can be seen here."


def load_pictures(model_dir: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Keyword arguments for the model, a prompt of one picture each; ``input_ids`` [1, T].

    Raises CalibrationError if the model has no processor or a file is no picture.
    """
    from PIL import Image, UnidentifiedImageError
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model_dir, local_files_only=True, use_fast=False)
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(f"{model_dir}: has no processor of pictures ({error})") from error
    if not hasattr(processor, "image_processor"):
        raise CalibrationError(f"{model_dir}: reads no pictures; drop --images")
    found = []
    for file in files:
        try:
            with Image.open(file) as opened:
                picture = opened.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise CalibrationError(f"{file}: cannot be read as a picture ({error})") from None
        content = [{"type": "image", "image": picture}, {"type": "text", "text": _WORDS}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        found.append(dict(inputs))
    return found


def hash_files(files: Sequence[Path]) -> str:
    """16 hex digits over the files' bytes in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
