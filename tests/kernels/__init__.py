"""Importing this package decides how Triton runs: without a GPU its kernels are interpreted.

Triton looks at $TRITON_INTERPRET at its import and each kernel at its own, so all of them are
imported here. Servers that other tests start must not inherit the variable.
"""

import importlib
import os
from pathlib import Path

import torch

from oscar_sglang.kernels import layout

INTERPRET = not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"
importlib.import_module("triton.experimental.gluon.language")  # the interpreter loads it late
for file in sorted(Path(layout.__file__).parent.glob("*.py")):
    importlib.import_module(f"oscar_sglang.kernels.{file.stem}")
if INTERPRET:
    del os.environ["TRITON_INTERPRET"]
