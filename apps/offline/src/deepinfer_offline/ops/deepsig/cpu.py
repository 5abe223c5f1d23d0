"""C kernels behind the portable ops on a CPU, compiled once with the machine's own compiler; without one, torch serves."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_offline.ops.cpu.build import CACHE_VARIABLE, OFF_VARIABLE

SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_FORMATS = {"fp8": 0, "nvfp4": 1, "mxfp4": 2}
_MAX_STREAMS = 8  # as in kernels.c
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "v41_encode": (_P, _P, _L, _I, _I, _P, _L),
    "v41_gather": (_P, _P, _L, _I, _I, _P, _L),
    "v41_sinkhorn": (_P, _L, _I, _I, _F),
    "v41_topk": (_P, _L, _L, _L, _P),
    "v41_topk_mask": (_P, _L, _L, _L, _P),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built on the first call (about a second), or None where they cannot be had: see `reason`."""
    return _load()[0]


def reason() -> str | None:
    """Why the kernels do not serve here, or None."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get(OFF_VARIABLE) == "0":
        return None, f"switched off by {OFF_VARIABLE}=0"
    try:
        found = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip() or repr(error)
        return None, f"they could not be built: {detail.splitlines()[-1]}"
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found, None


def _built() -> Path:
    """The library for this source and processor, in a folder that nobody else can write."""
    base = os.environ.get(CACHE_VARIABLE)
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepinfer"
    folder = folder.expanduser() / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} can be written by others, so nothing is loaded from it")
    processor = (
        Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0] if Path("/proc/cpuinfo").exists() else ""
    )
    flags = next((line for line in processor.splitlines() if line.startswith(("flags", "Features"))), "")
    key = "\n".join((SOURCE.read_text(), *_FLAGS, flags))
    file = folder / f"v41-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if not file.is_file():
        compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
        if compiler is None:
            raise OSError(f"no C compiler ({', '.join(_COMPILERS)}) is installed to build them with")
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *_FLAGS, "-o", str(draft), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        draft.replace(file)  # another process may build the same file; either result will do
    return file


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: on the CPU, contiguous, and the library is there."""
    return all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and library() is not None


def encode(values: Tensor, fmt: str, pool: Tensor, slots: Tensor | None) -> None:
    """float32 [t, n] to records at `slots` int64 [t] (None: in order) of `pool` uint8 [slots, width]."""
    lib = library()
    assert lib is not None
    where = None if slots is None else slots.data_ptr()
    lib.v41_encode(
        values.data_ptr(), where, values.shape[0], values.shape[1], _FORMATS[fmt], pool.data_ptr(), pool.shape[1]
    )


def gather(pool: Tensor, slots: Tensor, fmt: str, channels: int) -> Tensor:
    """Records at `slots` int64 [...] as float32 [..., channels]."""
    lib = library()
    assert lib is not None
    out = torch.empty(*slots.shape, channels)
    lib.v41_gather(
        pool.data_ptr(), slots.data_ptr(), slots.numel(), channels, _FORMATS[fmt], out.data_ptr(), pool.shape[1]
    )
    return out


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor | None:
    """See `mhc.sinkhorn`; None where the kernel does not take so many streams."""
    lib = library()
    if lib is None or logits.shape[-1] > _MAX_STREAMS:
        return None
    comb = logits.contiguous().clone()
    lib.v41_sinkhorn(comb.data_ptr(), comb.shape[0], comb.shape[-1], iterations, eps)
    return comb


def topk(scores: Tensor, k: int) -> Tensor:
    """See `topk.topk_lowest_index`: float32 [t, n] to int32 [t, k]."""
    lib = library()
    assert lib is not None
    out = torch.empty(scores.shape[0], k, dtype=torch.int32)
    lib.v41_topk(scores.data_ptr(), scores.shape[0], scores.shape[1], k, out.data_ptr())
    return out


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """See `topk.topk_mask`: float32 [t, n] to bool [t, n]."""
    lib = library()
    assert lib is not None
    out = torch.empty(scores.shape, dtype=torch.bool)
    lib.v41_topk_mask(scores.data_ptr(), scores.shape[0], scores.shape[1], k, out.data_ptr())
    return out
