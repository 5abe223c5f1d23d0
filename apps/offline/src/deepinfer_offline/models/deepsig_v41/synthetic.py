"""Random weights of any consistent configuration, for benchmarks and tests: not a model that says anything."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.layout import TensorSpec, checkpoint_specs
from deepinfer_offline.models.deepsig_v41.schedule import plan_layers

_OFFSETS = (".norm.weight", "_norm.weight", "q_weight", "k_weight", "hc_attn_scale", "hc_ffn_scale")


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    noise = torch.randn(spec.shape, generator=generator)
    name = spec.name
    if name == "norm.weight" or name.endswith(_OFFSETS):
        return 1 + 0.2 * noise
    if name.endswith(("_base", ".attn_sink", ".gate.bias", ".gate.bias_vl")):
        return 0.3 * noise
    if name.endswith("embed.weight"):
        return noise
    return noise * spec.shape[-1] ** -0.5


def random_tensors(config: V41Config, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(released name, float32 value) of every weight: norms near 1, projections that keep the variance."""
    generator = torch.Generator().manual_seed(seed)
    for name, spec in checkpoint_specs(config, plan_layers(config)).items():
        yield name, _draw(spec, generator)
