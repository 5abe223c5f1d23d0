"""Which op runs where, and why not. One table, read at start-up; an architecture is named, never `>= 90`."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

#: Compute capabilities whose kernels ran here, and those they only compile for.
RUN_ON = {90: "H200"}
COMPILED_FOR = {100: "compiles for sm_100, not run"}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}


@functools.lru_cache(maxsize=16)
def _cuda_arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


@functools.lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_arch(device: torch.device | str) -> int:
    """Compute capability of a CUDA device as 90, 100, ...; 0 for anything else."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    return _cuda_arch(device.index if device.index is not None else torch.cuda.current_device())


def interpreting() -> bool:
    """Whether Triton's interpreter is on: portable kernels then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_reason() -> str | None:
    """Why Triton cannot be used, or None."""
    try:
        import triton
    except ImportError:
        return "triton is not installed (it comes with torch on Linux)"
    major, minor = (int(x) for x in triton.__version__.split(".")[:2])
    return None if (major, minor) >= (3, 6) else f"triton {triton.__version__} is older than 3.6"


@dataclass(frozen=True)
class OpSupport:
    """What one op needs.

    Attributes:
        kernels: Kernel name to the architectures it is built for, best first.
        dtypes: Activation dtypes.
    """

    kernels: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


_PORTABLE = {"portable": (90, 100)}
_TUNED = {"sm90": (90,), "portable": (90, 100)}

#: Every public op. The order is that of the README's table.
OPS: dict[str, OpSupport] = {
    "sparse_mla_decode": OpSupport(_TUNED),
    "sparse_mla_prefill": OpSupport(_PORTABLE),
    "moe_experts": OpSupport(_TUNED),
    "mx_linear": OpSupport(_TUNED),
    "mhc_pre": OpSupport(_PORTABLE),
    "mhc_collapse": OpSupport(_PORTABLE),
    "mhc_post": OpSupport(_PORTABLE),
    "mhc_step": OpSupport(_TUNED),
    "indexer_logits": OpSupport(_TUNED),
    "topk_lowest_index": OpSupport(_TUNED),
    "candidate_mask": OpSupport(_PORTABLE),
    "router": OpSupport(_TUNED),
    "kv_insert": OpSupport(_PORTABLE),
    "kv_gather": OpSupport(_PORTABLE),
    "norm_rope_insert": OpSupport(_TUNED),
    "v4_insert": OpSupport(_TUNED),
    "v4_gather": OpSupport(_PORTABLE),
    "rope": OpSupport(_PORTABLE),
    "rms_norm": OpSupport(_PORTABLE),
    "compress": OpSupport(_PORTABLE),
    "engram_gather": OpSupport(_PORTABLE),
    "markov_step": OpSupport(_PORTABLE),
    "paged_gqa": OpSupport(_PORTABLE),
    "rope_gqa": OpSupport(_PORTABLE),
    "rotation": OpSupport(_PORTABLE),
    "step_inputs": OpSupport(_PORTABLE),
    "rope_round": OpSupport(_PORTABLE),
    "latent_insert": OpSupport(_PORTABLE),
    "window_index": OpSupport(_PORTABLE),
    "entry_index": OpSupport(_PORTABLE),
    "selected_slots": OpSupport(_PORTABLE),
    "pool_groups": OpSupport(_PORTABLE),
    "clamped_swiglu": OpSupport(_PORTABLE),
    "cache_slots": OpSupport(_PORTABLE),
    "cut_rows": OpSupport(_PORTABLE),
    "ragged_inputs": OpSupport(_PORTABLE),
    "llama_norm": OpSupport(_PORTABLE),
    "rope_insert": OpSupport(_PORTABLE),
    "silu_mul": OpSupport(_PORTABLE),
    "dense_linear": OpSupport(_PORTABLE),
    "argmax": OpSupport(_PORTABLE),
    "sample": OpSupport(_PORTABLE),
    "apply_bitmask": OpSupport(_PORTABLE),
    "verify_drafts": OpSupport(_PORTABLE, ("float32", "float64")),
    "engram_gate": OpSupport(_PORTABLE),
    "engram_update": OpSupport(_PORTABLE),
    "grouped_output": OpSupport(_PORTABLE),
}


def is_supported(op: str, device: torch.device | str, dtype: torch.dtype | None = None) -> str | None:
    """Why an op does not run on a device, or None if it does.

    Args:
        op: A name of `OPS`.
        device: A torch device.
        dtype: Activation dtype; None asks about the device only.

    Returns:
        A reason in one sentence, or None.
    """
    if op not in OPS:
        return f"unknown op {op!r}; known: {', '.join(OPS)}"
    reason = triton_reason()
    if reason is not None:
        return reason
    entry = OPS[op]
    if dtype is not None and dtype not in {_DTYPES[name] for name in entry.dtypes}:
        return f"{op} takes {', '.join(entry.dtypes)}, not {dtype}"
    if torch.device(device).type == "cpu" and interpreting():
        return None if "portable" in entry.kernels else f"{op} has no kernel that Triton's interpreter runs"
    arch = device_arch(device)
    if arch == 0:
        if torch.device(device).type == "cuda":
            return "no CUDA device answers" if torch.version.cuda else "this torch was built without CUDA"
        return f"{torch.device(device)} is no CUDA device; TRITON_INTERPRET=1 runs the portable kernels on a CPU"
    archs = sorted({a for each in entry.kernels.values() for a in each})
    if arch not in archs:
        return f"no kernel for compute capability {arch / 10}; there are kernels for {', '.join(map(str, archs))}"
    return None


@dataclass(frozen=True)
class CapabilityRow:
    """One line of the capability table."""

    op: str
    kernel: str | None
    reason: str | None
    note: str


def capability_table(device: torch.device | str, dtype: torch.dtype | None = None) -> list[CapabilityRow]:
    """For every op: the kernel that serves the device, or why none does, and whether it ever ran on that hardware."""
    arch = device_arch(device)
    rows = []
    for op, entry in OPS.items():
        reason = is_supported(op, device, dtype)
        kernel = None
        if reason is None:
            kernel = next((name for name, archs in entry.kernels.items() if arch in archs), "portable")
        note = RUN_ON.get(arch, COMPILED_FOR.get(arch, ""))
        rows.append(CapabilityRow(op, kernel, reason, f"measured on {note}" if arch in RUN_ON else note))
    return rows
