"""Stands for the package of this name, on a CPU: what was allocated in a region is thrown away.

While a region is paused its bytes are 0xFF (NaN in every float, -1 in every integer), as memory
that nobody should read; after a resume they are zero or, with $OSCAR_TEST_MEMORY=rubbish, 0xFF.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    """Keeps the storages of all tensors that operations return."""

    def __init__(self, kept: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.kept[storage.data_ptr()] = storage
        return out


class _Device(TorchFunctionMode):
    """What is moved to a device lies there a second time, even where the device is the host."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.clone() if function is torch.Tensor.to else out


class _MemorySaver:
    enabled = True
    hook_mode = "preload"

    def __init__(self) -> None:
        self.regions: dict[str, dict[int, torch.UntypedStorage]] = defaultdict(dict)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False):
        with _Recorder(self.regions[tag]), _Device():
            yield

    def pause(self, tag: str) -> None:
        print(f"memory saver: {tag} lost {self._fill(tag, 0xFF)} bytes", flush=True)

    def resume(self, tag: str) -> None:
        self._fill(tag, 0xFF if os.environ.get("OSCAR_TEST_MEMORY") == "rubbish" else 0)

    def _fill(self, tag: str, value: int) -> int:
        for storage in self.regions[tag].values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(value)
        return sum(storage.nbytes() for storage in self.regions[tag].values())

    @contextlib.contextmanager
    def disable(self):
        yield


torch_memory_saver = _MemorySaver()


@contextlib.contextmanager
def configure_subprocess():
    yield
