"""Peak memory of calibrating grows neither with the tokens nor with what a layer has seen."""

import subprocess
import sys

from tiny_models import llama

_CODE = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from oscar_sglang.calibration.collect import collect, load_model
model = load_model(Path(sys.argv[1]), "cpu")
ids = torch.randint(256, (20, 1024), generator=torch.Generator().manual_seed(0))
for n in (2, 2, 20):
    collect(model, list(ids[:n]), capacity=32)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_ten_times_the_tokens_need_no_more_memory(tmp_path):
    """Keeping the rows of a sequence would cost 6 MiB each time."""
    command = [sys.executable, "-c", _CODE, str(llama(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, few, many = map(int, done.stdout.split())
    assert many - few < 30
