"""Kernels in CUDA C++, compiled at first use by the NVRTC that comes with torch; no compiler has to be installed.

For the few kernels that Triton cannot express: exchange inside a cluster, roles of warp groups, codes decoded straight
into matrix operands. Sources lie in `cuda/`; they include nothing but each other.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import re
import struct
import sys
import tempfile
from pathlib import Path

import torch

from .errors import KernelError
from .overlap import overlaps

_SOURCES = Path(__file__).with_name("cuda")
_LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class NativeError(KernelError, RuntimeError):
    """NVRTC or the driver refused; the message carries its words."""


@functools.lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC library of the torch wheel, or the system's."""
    folders = [os.path.join(p, "nvidia", "*", "lib") for p in sys.path] + [str(Path(torch.__file__).parent / "lib")]
    found = [path for folder in folders for name in _LIBRARY_NAMES for path in glob.glob(os.path.join(folder, name))]
    for candidate in (*found, *_LIBRARY_NAMES):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise NativeError(f"none of {', '.join(_LIBRARY_NAMES)} can be loaded; a CUDA build of torch brings one")


@functools.lru_cache(maxsize=1)
def native_reason() -> str | None:
    """Why CUDA C++ kernels cannot be compiled here, or None."""
    try:
        _nvrtc()
    except NativeError as failure:
        return str(failure)
    return None


def read_source(name: str) -> str:
    """A source of `cuda/` with its quoted includes put in place."""
    lines = (_SOURCES / name).read_text().splitlines()
    return "\n".join(
        read_source(line.split('"')[1]) if line.startswith('#include "') else line
        for line in lines
        if line != "#pragma once"
    )


def compile_native(name: str, arch: int = 90, defines: tuple[str, ...] = ()) -> bytes:
    """Compile one source of `cuda/` to machine code for an architecture, with macros `NAME=VALUE`; needs no GPU.

    Raises:
        NativeError: NVRTC is missing, or the compiler's log.
    """
    lib = _nvrtc()
    program = ctypes.c_void_p()
    text = read_source(name).encode()
    _check_rtc(lib.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None), name)
    words = (f"--gpu-architecture=sm_{arch}a", "--std=c++17", "-default-device", *(f"-D{each}" for each in defines))
    options = [word.encode() for word in words]
    result = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if result:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise NativeError(f"{name}: {log.value.decode()[:4000]}")
    _check_rtc(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), name)
    code = ctypes.create_string_buffer(size.value)
    _check_rtc(lib.nvrtcGetCUBIN(program, code), name)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _check_rtc(result: int, name: str) -> None:
    if result:
        raise NativeError(f"{name}: NVRTC error {result}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a cluster's size, or that the launch may overlap with the end of the kernel before."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check_driver(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise NativeError(f"{what}: CUDA error {result}, {(text.value or b'unknown').decode()}")


class NativeKernel:
    """One entry point of one source.

    Args:
        source: File name under `cuda/`.
        entry: `extern "C"` name.
        arguments: `struct` letters of the parameters in order: P pointer, i int32, q int64, f float32, 128s a tensor map.
        threads: Threads a block.
        shared: Bytes of dynamic shared memory.
        defines: Macros of the source, `NAME=VALUE`.
    """

    def __init__(
        self, source: str, entry: str, arguments: str, *, threads: int, shared: int = 0, defines: tuple[str, ...] = ()
    ) -> None:
        self.source, self.entry, self.threads, self.shared, self.defines = source, entry, threads, shared, defines
        self._layout = struct.Struct("@" + arguments)
        letters = re.findall(r"\d*[a-zA-Z]", arguments)
        ends = [struct.calcsize("@" + "".join(letters[:i]) + "0" + each[-1]) for i, each in enumerate(letters)]
        self._offsets = ends if "s" in arguments else []
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._clusters: dict[tuple[int, int], int] = {}

    def _load(self, device: int) -> ctypes.c_void_p:
        if device not in self._functions:
            driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
            torch.cuda.current_stream(device)  # makes sure that the device has its context
            code = _machine_code(self.source, 90, self.defines)
            _check_driver(driver.cuModuleLoadData(ctypes.byref(module), code), self.source)
            _check_driver(driver.cuModuleGetFunction(ctypes.byref(function), module, self.entry.encode()), self.entry)
            if self.shared > 48 * 1024:
                _check_driver(driver.cuFuncSetAttribute(function, 8, self.shared), f"{self.entry}: shared memory")
            # Clusters of more than 8 blocks are allowed where asked for.
            _check_driver(driver.cuFuncSetAttribute(function, 14, 1), f"{self.entry}: cluster size")
            self._functions[device] = function
        return self._functions[device]

    def __call__(
        self, grid: tuple[int, int, int], *arguments: float | bytes, device: torch.device, cluster: int = 1
    ) -> None:
        """Launch on the current stream of `device`; blocks of one cluster are neighbours along x.

        Raises:
            NativeError: The driver's words.
        """
        index = device.index if device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(index):
            function = self._load(index)
            packed = self._layout.pack(*arguments)
            start, size = ctypes.cast(packed, ctypes.c_void_p), ctypes.c_size_t(len(packed))
            extra = (ctypes.c_void_p * 5)(1, start, 2, ctypes.cast(ctypes.pointer(size), ctypes.c_void_p), 0)
            each = None
            if self._offsets:  # the compiler aligns a tensor map by its address: the first is not at offset 0
                each, extra = (ctypes.c_void_p * len(self._offsets))(*(start.value + at for at in self._offsets)), None
            # Every kernel of `cuda/` waits (`wait_for_kernels`) before it touches what kernels ahead may write; it may read
            # weights earlier.
            config = self._config(grid, cluster, torch.cuda.current_stream(index).cuda_stream, overlaps(device))
            _check_driver(_driver().cuLaunchKernelEx(ctypes.byref(config), function, each, extra), self.entry)

    def _config(self, grid: tuple[int, int, int], cluster: int, stream: int | None, overlapping: bool) -> _Config:
        wanted = [_Attribute(4, 0, (ctypes.c_uint * 16)(cluster, 1, 1))] if cluster > 1 else []
        if overlapping:
            wanted.append(_Attribute(6, 0, (ctypes.c_uint * 16)(1)))
        attributes = (_Attribute * 2)(*wanted)
        return _Config(
            (ctypes.c_uint * 6)(*grid, self.threads, 1, 1), self.shared, stream,
            ctypes.cast(attributes, ctypes.POINTER(_Attribute)), len(wanted),
        )  # fmt: skip

    def clusters(self, device: torch.device, size: int) -> int:
        """How many clusters of `size` blocks a device runs at once; 0 where its groups of multiprocessors are smaller.

        Raises:
            NativeError: The driver's words.
        """
        index = device.index if device.index is not None else torch.cuda.current_device()
        if (index, size) not in self._clusters:
            count = ctypes.c_int()
            with torch.cuda.device(index):
                config = self._config((1024 * size, 1, 1), size, None, overlapping=False)
                result = _driver().cuOccupancyMaxActiveClusters(
                    ctypes.byref(count), self._load(index), ctypes.byref(config)
                )
            _check_driver(result, f"{self.entry}: clusters at once")
            self._clusters[index, size] = count.value
        return self._clusters[index, size]

    def resident(self, device: torch.device) -> int:
        """How many blocks a device holds at once.

        Raises:
            NativeError: The driver's words.
        """
        index = device.index if device.index is not None else torch.cuda.current_device()
        count = ctypes.c_int()
        with torch.cuda.device(index):
            result = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self._load(index), self.threads, ctypes.c_size_t(self.shared)
            )
        _check_driver(result, f"{self.entry}: blocks at once")
        return count.value * torch.cuda.get_device_properties(index).multi_processor_count


@functools.lru_cache(maxsize=16)
def _machine_code(source: str, arch: int, defines: tuple[str, ...]) -> bytes:
    """Compiled once for a source, an architecture and a compiler: under `$XDG_CACHE_HOME/deepinfer` (`~/.cache`)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_rtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), source)
    key = hashlib.sha256(f"{read_source(source)} {arch} {defines} {major.value}.{minor.value}".encode()).hexdigest()[
        :32
    ]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer" / "kernels"
    path = folder / f"{Path(source).stem}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_native(source, arch, defines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError:
        pass  # a read-only home: compile again next time
    return code
