"""Other people's kernels that may be there, and a choice between implementations that is made by measuring."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .errors import ArgumentError

#: Library -> where it may live: the user's own install first, then vLLM's vendored copy.
_LIBRARIES = {
    "deep_gemm": ("deep_gemm", "vllm.third_party.deep_gemm"),
    "flash_mla": ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface"),
    "deep_ep": ("deep_ep",),
}


@dataclass(frozen=True)
class Library:
    """A third-party library: the module it was found as, or why it is not there."""

    name: str
    module: ModuleType | None
    reason: str | None


def find_library(name: str) -> Library:
    """Import `deep_gemm`, `flash_mla` or `deep_ep` from wherever it is.

    Any failure of an import is a reason, not an error: vendored builds fail in many ways (missing symbols, wrong torch).

    Raises:
        ArgumentError: Unknown library.
    """
    if name not in _LIBRARIES:
        raise ArgumentError(f"library {name!r} is not one of {', '.join(_LIBRARIES)}")
    reasons = []
    for path in _LIBRARIES[name]:
        try:
            return Library(name, importlib.import_module(path), None)
        except Exception as failure:
            reasons.append(f"{path}: {type(failure).__name__}: {failure}")
    return Library(name, None, "; ".join(reasons))


def _microseconds(fn: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Least time of a call, microseconds; device events on CUDA, the clock elsewhere."""
    fn()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            fn()
            times.append((time.perf_counter() - begin) * 1e6)
        return min(times)
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        begin_event.record()
        fn()
        end_event.record()
        end_event.synchronize()
        times.append(begin_event.elapsed_time(end_event) * 1e3)
    return min(times)


class MeasuredChoice:
    """Picks the fastest of several implementations, once for each key, and remembers why.

    Not inside a CUDA graph capture: a key must be measured (call `choose`) before capture begins.
    """

    def __init__(self) -> None:
        self.chosen: dict[Hashable, str] = {}
        self.timings: dict[Hashable, dict[str, float]] = {}
        self.failures: dict[Hashable, dict[str, str]] = {}

    def choose(self, key: Hashable, candidates: Mapping[str, Callable[[], Any]], device: torch.device) -> str:
        """Name of the fastest candidate for `key`; a candidate that raises is out, with its reason kept in `failures`.

        Raises:
            ArgumentError: No candidate works; the message has every reason.
        """
        if key in self.chosen:
            return self.chosen[key]
        timings, failures = {}, {}
        for name, fn in candidates.items():
            try:
                timings[name] = _microseconds(fn, device)
            except Exception as failure:
                failures[name] = f"{type(failure).__name__}: {failure}"
        if not timings:
            raise ArgumentError(f"no candidate works for {key}: {failures}")
        self.timings[key], self.failures[key] = timings, failures
        self.chosen[key] = min(timings, key=timings.__getitem__)
        return self.chosen[key]
