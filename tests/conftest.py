import sys
from pathlib import Path

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

if not has_gpu():
    enter_cpu_mode()  # before anything imports transformers or sglang

# With --import-mode=importlib helper modules need a path: those beside the tests, and those that
# tests share with scripts.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts" / "lib"), str(HERE.parent / "scripts")]
