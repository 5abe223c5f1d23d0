"""Which of this package's ops can stand in for vLLM's, and which do on the device at hand. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deepinfer_kernels_cuda.capability import OPS

ALL = "all"

#: Op -> the layer of vLLM that it replaces. Only these can be asked for.
LAYERS = {"rms_norm": "RMSNorm"}

_IN_MODEL = "vLLM's DeepSig V4.1 model names its own kernels; it asks no registry"
_SAMPLER = "vLLM's sampler asks no registry"
_LAYOUT = "it reads and writes this package's cache records, which vLLM's caches are not"

#: Why an op of this package replaces nothing in vLLM 0.33.
NO_SEAM = {
    "sparse_mla_decode": _IN_MODEL,
    "sparse_mla_prefill": _IN_MODEL,
    "moe_experts": "vLLM's quantisation methods choose among a closed list of expert kernels",
    "mx_linear": "vLLM's quantisation methods choose among a closed list of linear kernels",
    "mhc_pre": _IN_MODEL,
    "mhc_collapse": _IN_MODEL,
    "mhc_post": _IN_MODEL,
    "mhc_step": _IN_MODEL,
    "indexer_logits": _LAYOUT,
    "topk_lowest_index": _IN_MODEL,
    "candidate_mask": _IN_MODEL,
    "router": _IN_MODEL,
    "kv_insert": _LAYOUT,
    "kv_gather": _LAYOUT,
    "norm_rope_insert": _LAYOUT,
    "rope": "it rotates adjacent channels; Llama-class models in vLLM rotate halves",
    "compress": _IN_MODEL,
    "engram_gather": _IN_MODEL,
    "markov_step": "vLLM's drafter asks no registry",
    "paged_gqa": "it has no windows, sinks or soft cap and was not measured against vLLM's own attention backends",
    "sample": _SAMPLER,
    "apply_bitmask": _SAMPLER,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one op.

    Attributes:
        op: its name in this package.
        layer: the layer of vLLM that it replaces, or None if it replaces nothing.
        reason: why it does not, or what is known of the kernel.
    """

    op: str
    layer: str | None
    reason: str


def read_switch(value: str) -> tuple[str, ...]:
    """Read `DEEPINFER_KERNELS`: names with commas, `all`, or nothing.

    Raises:
        ValueError: a name that cannot be asked for; the message lists those that can.
    """
    names = tuple(name.strip() for name in value.split(",") if name.strip() not in ("", "0"))
    for name in names:
        if name not in LAYERS and name != ALL:
            known = ", ".join((*LAYERS, ALL))
            why = f": {NO_SEAM[name]}" if name in NO_SEAM else ""
            raise ValueError(f"DEEPINFER_KERNELS has {name!r}{why}; it knows {known}")
    return tuple(LAYERS) if ALL in names else names


def decide(asked: Iterable[str], capability: int, interpreted: bool) -> list[Decision]:
    """Decide for every op of the package.

    Args:
        asked: what the user wants, from `read_switch`.
        capability: compute capability of the device, 0 for none.
        interpreted: whether Triton's interpreter runs kernels on CPU tensors.
    """
    chosen = set(asked)
    return [_decide(op, op in chosen, capability, interpreted) for op in OPS]


def refuse(reason: str) -> list[Decision]:
    """For every op of the package why it replaces nothing, where `reason` keeps back those that could."""
    return [replace(row, reason=reason) if row.op in LAYERS else row for row in decide((), 0, False)]


def _decide(op: str, asked: bool, capability: int, interpreted: bool) -> Decision:
    layer = LAYERS.get(op)
    if layer is None:
        return Decision(op, None, NO_SEAM.get(op, "vLLM 0.33 asks no registry for it"))
    kernels = OPS[op].kernels
    fitting = [name for name, archs in kernels.items() if capability in archs]
    if not fitting and not (capability == 0 and interpreted and "portable" in kernels):
        built = ", ".join(str(arch) for arch in sorted({a for archs in kernels.values() for a in archs}))
        device = f"compute capability {capability / 10}" if capability else "a machine without a CUDA device"
        return Decision(op, None, f"no kernel for {device}; there are kernels for {built}")
    if not asked:
        return Decision(op, None, f"not asked for: DEEPINFER_KERNELS={op}")
    if not fitting:
        return Decision(op, layer, "in Triton's interpreter, for tests")
    # The kernels of this folder keep vLLM's roundings; those of the package, which were measured, do not.
    return Decision(op, layer, f"compiles for sm_{capability}, not run on it")
