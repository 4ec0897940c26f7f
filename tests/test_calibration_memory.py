"""Peak memory of calibrating grows neither with the tokens nor with what the layers have seen."""

import os
import subprocess
import sys

from scripts.lib.tiny_models import family, llama

_CODE = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from oscar_sglang.calibration.collect import collect, load_model
model = load_model(Path(sys.argv[1]), "cpu")
ids = torch.randint(256, (20, 1024), generator=torch.Generator().manual_seed(0))
for n in map(int, sys.argv[2:]):
    collect(model, list(ids[:n]), capacity=32)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peaks(model, *sequences: int) -> list[int]:
    """MiB after each run over so many sequences of 1024 tokens, in one process."""
    command = [sys.executable, "-c", _CODE, str(model), *map(str, sequences)]
    # Freed blocks go back to the system at once: what counts is what is held, not fragmentation.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return list(map(int, done.stdout.split()))


def test_ten_times_the_tokens_need_no_more_memory(tmp_path):
    """Keeping the rows of a sequence would cost 6 MiB each time."""
    _, few, many = peaks(llama(tmp_path), 2, 2, 20)
    assert many - few < 30


def test_more_layers_cost_their_weights_and_moments_only(tmp_path):
    """40 more layers have 15 MiB of weights and 11 of moments; their rows would be 120 MiB."""
    small = family("llama-64", tmp_path / "small", num_hidden_layers=2)
    large = family("llama-64", tmp_path / "large", num_hidden_layers=42)
    assert peaks(large, 1)[0] - peaks(small, 1)[0] < 70
