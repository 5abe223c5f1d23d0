"""Which implementation runs the layers of a V4.1 model on a device, and why."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.ops.cuda.support import NAME, kernels, supports
from deepinfer_offline.ops.registry import Provider, anywhere, registry, slower_notes

OP = "v41_layers"
_NEEDED = (
    "mhc_step", "mhc_post", "mhc_collapse", "router", "moe_experts", "sparse_mla_decode", "indexer_logits",
    "topk_lowest_index", "candidate_mask", "norm_rope_insert", "kv_gather", "rope", "rms_norm", "engram_gather",
    "rotation", "window_index", "entry_index", "selected_slots", "pool_groups", "clamped_swiglu", "grouped_output",
    "latent_insert", "rope_round", "engram_gate",
)  # fmt: skip


def choose_layers(config: V41Config, options: ModelOptions) -> Any:
    """The class that runs the layers: `Backbone` or `DeviceBackbone`."""
    return registry.select(OP, options.device, options.dtype, detail=config).load()


def layer_notes(config: V41Config, options: ModelOptions) -> tuple[str, ...]:
    """What is slower than it could be on this device, a sentence each."""
    return slower_notes({OP: registry.missed(OP, options.device, options.dtype, config)})


def takes_kernels(config: V41Config, options: ModelOptions) -> bool:
    """Whether `DeviceBackbone` runs the layers."""
    return registry.select(OP, options.device, options.dtype, detail=config).name == NAME


def packs_experts(config: V41Config, options: ModelOptions) -> bool:
    """Whether FP4 experts are repacked at load for the kernels that will read them."""
    return config.quantised and takes_kernels(config, options)


def pack_experts(experts: Any, *, dtype: torch.dtype) -> Any:
    """A layer's FP4 experts as the kernels read them for activations of a dtype; dense ones as they are."""
    return experts if experts.gate_up_scale is None else kernels().prepare_experts(experts, dtype=dtype)


def shape_reason(config: V41Config) -> str | None:
    """Why the kernels do not take a configuration, or None."""
    groups = config.index_head_dim // 32
    rules = (
        (config.hc_mult in (1, 2, 4), f"hc_mult {config.hc_mult} is not 1, 2 or 4"),
        (config.num_attention_heads <= 128, f"{config.num_attention_heads} heads are more than 128"),
        (config.head_dim <= 512, f"head_dim {config.head_dim} is more than 512"),
        (
            config.index_head_dim % 32 == 0 and groups & (groups - 1) == 0,
            f"index_head_dim {config.index_head_dim} is not 32 times a power of two",
        ),
        (config.index_topk <= 4096, f"index_topk {config.index_topk} is more than 4096"),
        (config.n_routed_experts <= 2048, f"{config.n_routed_experts} experts are more than 2048"),
    )
    return next((why for kept, why in rules if not kept), None)


def _reference() -> Any:
    from deepinfer_offline.models.deepsig_v41.backbone import Backbone

    return Backbone


def _kernels() -> Any:
    from deepinfer_offline.models.deepsig_v41.device import DeviceBackbone

    return DeviceBackbone


registry.register(Provider(OP, "portable", "portable", anywhere, _reference))
registry.register(Provider(OP, NAME, "kernel", supports(*_NEEDED), _kernels, accepts=shape_reason, device="cuda"))
