# Third-party modules whose arguments no type checker knows.
# pyrefly: ignore-errors
"""Ways to compute one thing, ours and the libraries': each called, checked and recorded."""

from __future__ import annotations

import deepinfer_kernels_cuda as kernels
import torch
from gpu_bench import Recorder


class LibraryMissingError(RuntimeError):
    """A library that a part is compared with is not here, or not for this device."""


class Rows:
    """Records a line for each way; without a recorder it only calls what a word names.

    Args:
        recorder: Times and prints; None times nothing.
        warm_up: `ours`, `all` of DeepGEMM, or a number: that call of DeepGEMM's alone (each compiles for many seconds).
    """

    def __init__(self, recorder: Recorder | None, warm_up: str | None = None) -> None:
        self.recorder, self.warm_up, self.calls, self.failed = recorder, warm_up, 0, 0
        self.ours = recorder is not None or warm_up == "ours"

    def _wants(self, op: str, kernel: str) -> bool:
        library = op if op in ("DeepGEMM", "FlashMLA") else kernel
        self.calls += library == "DeepGEMM"
        if self.recorder is not None:
            return True
        if self.warm_up == "ours":
            return library not in ("DeepGEMM", "FlashMLA")
        return library == "DeepGEMM" and self.warm_up in ("all", str(self.calls - 1))

    def add(self, op, shape, kernel, call, *, nbytes, flops=0.0, check=None, **extra) -> None:
        if not self._wants(op, kernel):
            return
        try:
            out = call()
            torch.cuda.synchronize()
            error = check(out) if check else None
        except Exception as failure:
            self.failed += 1
            print(f"{op} {shape} {kernel} FAILED {type(failure).__name__}: {str(failure)[:400]}", flush=True)
            return
        if self.recorder:
            self.recorder.record(op, shape, kernel, call, nbytes=nbytes, flops=flops, error=error, **extra)


def library(name: str):
    """The module, or an error with its reason."""
    found = kernels.find_library(name)
    if found.module is None:
        raise LibraryMissingError(f"{name}: {found.reason}")
    return found.module
