"""Compiling the C kernels with the machine's own compiler, once, into the user's cache folder.

They are optional: without a compiler, or on another processor, the portable ops serve, and `deepinfer doctor` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 60  # seconds
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")

OFF_VARIABLE = "DEEPINFER_CPU_KERNELS"
"""Set to 0 to leave the C kernels out."""
CACHE_VARIABLE = "DEEPINFER_CACHE_DIR"
"""Folder of compiled kernels; default `$XDG_CACHE_HOME/deepinfer`, else `~/.cache/deepinfer`."""


@dataclass(frozen=True, slots=True)
class Build:
    """The loaded library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


@functools.cache
def cpu_kernels() -> Build:
    """Compile (the first time on this machine, about a second) and load the kernels."""
    reason = _unsupported()
    if reason is not None:
        return Build(None, reason)
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    try:
        file = _library_file()
        if not file.is_file():
            if compiler is None:
                return Build(None, f"no C compiler ({', '.join(_COMPILERS)}) is installed to build them with")
            _compile(compiler, file)
        return Build(ctypes.CDLL(str(file)), None)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        return Build(None, f"they could not be built: {lines[-1] if lines else type(error).__name__}")


def _unsupported() -> str | None:
    if os.environ.get(OFF_VARIABLE) == "0":
        return f"switched off by {OFF_VARIABLE}=0"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    missing = [flag for flag in _NEEDED if flag not in _cpu_flags()]
    return f"this processor lacks {', '.join(missing)}" if missing else None


@functools.cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _library_file() -> Path:
    """Where the library for this source and this processor is kept. Its folder is nobody else's to write."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser()
    folder = folder if os.environ.get(CACHE_VARIABLE) else folder / "deepinfer"
    folder = folder / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} can be written by others, so nothing is loaded from it")
    key = "\n".join([SOURCE.read_text(encoding="utf-8"), *FLAGS, *sorted(_cpu_flags())])
    return folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"


def _compile(compiler: str, file: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=file.stem, suffix=".tmp", dir=file.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", name, str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
        os.replace(name, file)  # another process may build the same file; either result will do
    finally:
        Path(name).unlink(missing_ok=True)
