"""``python -m oscar_sglang.launch_server ARGS``: SGLang's launcher, also without a GPU.

Takes SGLang's own arguments. On a machine with a GPU it adds nothing: the plugin is found by
``python -m sglang.launch_server`` just as well. Without one, SGLang needs CUDA-only packages to
be importable; the stand-ins for them go on ``PYTHONPATH``, because scheduler processes import
them before any plugin is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

STANDINS = Path(__file__).parent / "standins"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is present; asks the system, not torch (slow to import)."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def cpu_environment(environ: dict[str, str]) -> dict[str, str]:
    """The variables SGLang's CPU engine needs, on top of ``environ``."""
    missing = [
        folder
        for folder, module in (("kernel", "sgl_kernel"), ("vision", "torchvision"))
        if not _is_installed(module)
    ]
    path = [str(STANDINS / folder) for folder in missing]
    if old := environ.get("PYTHONPATH"):
        path += [p for p in old.split(os.pathsep) if p not in path]
    added = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(path)}
    # Unset, OpenMP oversubscribes small machines: 21 s instead of 2 s for a start-up step.
    added["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", "1")
    return added


def _is_installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and not str(spec.origin).startswith(str(STANDINS))


def enter_cpu_mode() -> None:
    """Apply ``cpu_environment`` to this process and its children."""
    os.environ.update(cpu_environment(dict(os.environ)))
    for entry in reversed(os.environ["PYTHONPATH"].split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)


def wants_cpu(argv: list[str]) -> bool:
    if "--device" in argv:
        return argv[argv.index("--device") + 1 : argv.index("--device") + 2] == ["cpu"]
    return any(a == "--device=cpu" for a in argv)


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not has_gpu() and not any(a.startswith("--device") for a in argv):
        print("oscar: no GPU found, serving on the CPU (--device cpu)", flush=True)
        argv += ["--device", "cpu"]
    if wants_cpu(argv) and not has_gpu():
        enter_cpu_mode()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.common import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
