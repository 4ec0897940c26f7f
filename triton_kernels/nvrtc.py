"""Compile CUDA C++ at run time with the NVRTC that PyTorch's wheels bring; cubins are kept on disk.

No toolkit is needed: our sources include no headers. Cubins lie in ``kernels`` of our cache
directory, one file per source and options.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

from ..cache import cache_dir

_LIBRARY_GLOBS = ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")


class CompileError(RuntimeError):
    """NVRTC rejected a source; the message is its log."""


def _candidates():
    """NVRTC libraries: those of pip's nvidia packages first, then the system's."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for pattern in _LIBRARY_GLOBS:
            yield from sorted(Path(root).glob(pattern))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    yield from sorted(Path(home).glob("lib64/libnvrtc.so.*"))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def library() -> ctypes.CDLL:
    """The first NVRTC that loads; OSError where there is none."""
    for path in _candidates():
        if "builtins" in str(path) or ".alt." in str(path):
            continue
        try:
            if isinstance(path, Path):  # NVRTC opens this one by bare name
                for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            lib = ctypes.CDLL(str(path))
        except OSError:
            continue
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        return lib
    raise OSError("no libnvrtc found: it comes with PyTorch's CUDA wheels (nvidia-cuda-nvrtc)")


def available() -> bool:
    try:
        library()
    except OSError:
        return False
    return True


@functools.cache
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC: {library().nvrtcGetErrorString(code).decode()}")


def _text(program, size_of, fill) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(fill(program, buffer))
    return buffer.raw


def _compile(source: str, options: tuple[str, ...], name: str) -> bytes:
    lib, program = library(), ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        code = lib.nvrtcCompileProgram(program, len(options), flags)
        if code:
            log = _text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog)
            raise CompileError(f"{name} ({' '.join(options)}):\n{log.decode().rstrip(chr(0))}")
        return _text(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def arch_of(capability: tuple[int, int]) -> str:
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def compile_cubin(source: str, arch: str, defines: dict[str, int], name: str) -> bytes:
    """cubin of ``source`` for ``arch`` (``arch_of``), from disk when it was built before."""
    options = (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "-default-device",  # lambdas carry no annotation
        *(f"-D{key}={value}" for key, value in sorted(defines.items())),
    )
    digest = hashlib.sha256(repr((source, options, version())).encode()).hexdigest()[:32]
    path = cache_dir() / "kernels" / f"{Path(name).stem}-{digest}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = _compile(source, options, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, path)  # ranks of one host may compile at the same time
    except OSError:
        pass  # a read-only home only costs the next start two seconds
    return cubin
