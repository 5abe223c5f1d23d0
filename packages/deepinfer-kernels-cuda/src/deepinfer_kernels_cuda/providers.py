"""Other people's kernels that may be there, and a choice between implementations that is made by measuring."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
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


#: Cycles of a device that the host is ahead when a call is timed: about a millisecond.
_HEAD_START = 2_000_000


@dataclass(frozen=True)
class Library:
    """A third-party library: the module it was found as, or why it is not there."""

    name: str
    module: ModuleType | None
    reason: str | None


@functools.lru_cache(maxsize=8)
def find_library(name: str) -> Library:
    """Import `deep_gemm`, `flash_mla` or `deep_ep` from wherever it is.

    Any failure of an import is a reason, not an error: vendored builds fail in many ways (missing symbols, wrong torch).
    `DEEPINFER_KERNELS_LIBRARIES`, where set, names the libraries that may be used, with commas; empty means none.

    Raises:
        ArgumentError: Unknown library.
    """
    if name not in _LIBRARIES:
        raise ArgumentError(f"library {name!r} is not one of {', '.join(_LIBRARIES)}")
    allowed = os.environ.get("DEEPINFER_KERNELS_LIBRARIES")
    if allowed is not None and name not in (word.strip() for word in allowed.split(",")):
        return Library(name, None, f"{name} is not in DEEPINFER_KERNELS_LIBRARIES={allowed!r}")
    reasons = []
    for path in _LIBRARIES[name]:
        try:
            return Library(name, importlib.import_module(path), None)
        except Exception as failure:
            reasons.append(f"{path}: {type(failure).__name__}: {failure}")
    return Library(name, None, "; ".join(reasons))


def _microseconds(fn: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Least time of a call, microseconds; of the device's own work on CUDA, by the clock elsewhere."""
    fn()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            fn()
            times.append((time.perf_counter() - begin) * 1e6)
        return min(times)
    with torch.cuda.device(device):
        return min(_device_microseconds(fn) for _ in range(repeats))


def _device_microseconds(fn: Callable[[], Any]) -> float:
    """Time of one call's kernels: the device is kept busy for a millisecond, in which the host queues all of them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _versions() -> str:
    """What a measurement holds for: versions of torch, Triton and the libraries."""
    words = []
    for package in ("torch", "triton", "deep-gemm", "flash-mla", "deep-ep", "vllm"):
        try:
            words.append(f"{package}={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " ".join(words)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choices_path() -> Path:
    """`DEEPINFER_KERNELS_CACHE`, or a file in the user's cache folder."""
    named = os.environ.get("DEEPINFER_KERNELS_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else cache / "deepinfer" / "kernel_choices.json"


class MeasuredChoice:
    """Picks the fastest of several implementations, once for each key, and remembers why.

    Not inside a CUDA graph capture: a key must be measured (call `choose`) before capture begins.

    Args:
        path: File that keeps choices between processes, by device, versions and key; None keeps none. A file that cannot
            be read or written costs the memory, nothing else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
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
        entry = f"{_device_name(device)} | {_versions()} | {key!r}"
        known = self._read().get(entry, {})
        tried = set(known.get("timings", {})) | set(known.get("failures", {}))
        if known.get("chosen") in candidates and tried == set(candidates):
            self.timings[key], self.failures[key] = known["timings"], known["failures"]
            self.chosen[key] = known["chosen"]
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
        self._write(entry, {"chosen": self.chosen[key], "timings": timings, "failures": failures})
        return self.chosen[key]

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text()) if self.path is not None else {}
        except (OSError, ValueError):
            return {}

    def _write(self, entry: str, value: dict[str, Any]) -> None:
        """Add one entry; the file is replaced whole, so that a reader never sees half of it."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(self._read() | {entry: value}, file, indent=1)
            Path(file.name).replace(self.path)
        except OSError:
            return


#: Choices of this process, kept on disk.
measured = MeasuredChoice(choices_path())
