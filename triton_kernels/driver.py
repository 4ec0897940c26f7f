"""Load cubins and launch their kernels through the CUDA driver API (ctypes, no dependencies)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from .nvrtc import arch_of, compile_cubin

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STATIC_SHARED_LIMIT = 48 * 1024


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'?').decode()} ({code})")


class Kernel:
    """One entry of a cubin, loaded on one device.

    overlap: let its CTAs start while the previous kernel of the stream drains (sm_90 and up);
    the kernel itself waits before it reads what that kernel wrote.
    """

    def __init__(
        self, module: ctypes.c_void_p, name: str, threads: int, shared: int, overlap: bool
    ):
        self._function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        if shared > _STATIC_SHARED_LIMIT:
            _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))
        self._attribute = _Attribute(id=_PROGRAMMATIC, value=1)
        self._threads, self._shared, self._overlap = threads, shared, overlap

    def __call__(self, grid: tuple[int, int, int], args: ctypes.Structure, stream: int) -> None:
        config = _Config(
            grid=grid,
            block=(self._threads, 1, 1),
            shared=self._shared,
            stream=stream,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(self._overlap),
        )
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, params, None))


class Source(NamedTuple):
    """A program: ``files`` beside this one, one after another. ``mirrors``: the ctypes mirrors of
    its argument blocks, called as these."""

    files: tuple[str, ...]
    mirrors: tuple[type[ctypes.Structure], ...]

    @property
    def name(self) -> str:
        return self.files[-1]

    def checks(self) -> str:
        """C++ that compiles only where each block is as its mirror: as large, with fields of the
        same names and sizes in the same order, and no other."""
        lines = []
        for mirror in self.mirrors:
            block, fields = mirror.__name__, [field[0] for field in mirror._fields_]
            same = [f"sizeof({block}) == {ctypes.sizeof(mirror)}"]
            for i, name in enumerate(fields):
                same.append(f"&field{i} == &blank_{block}.{name}")
                same.append(f"sizeof(field{i}) == {getattr(mirror, name).size}")
            bound = ", ".join(f"field{i}" for i in range(len(fields)))
            lines += [
                f"constexpr {block} blank_{block}{{}};",
                f"constexpr bool same_{block}() {{",
                f"  const auto& [{bound}] = blank_{block};",
                f"  return {' && '.join(same)};",
                "}",
                f'static_assert(same_{block}(), "{block} is not as its ctypes mirror");',
            ]
        return "\n".join(lines)

    def text(self) -> str:
        here = Path(__file__).parent
        return "\n".join([*((here / file).read_text() for file in self.files), self.checks()])


@functools.cache
def module(source: Source, defines: tuple[tuple[str, int], ...], device: int):
    """The module of ``source`` for the device."""
    arch = arch_of(torch.cuda.get_device_capability(device))
    cubin = compile_cubin(source.text(), arch, dict(defines), source.name)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the primary context current
        _check(_driver().cuModuleLoadData(ctypes.byref(handle), cubin))
    return handle


def overlaps(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def shared_limit(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
