"""Tensor names and shapes of Llama-family checkpoints, and reading one layer's worth of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.weights.ledger import check_tensors, read_tensors
from deepinfer_offline.weights.source import ModelSource

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's tensors by short name, e.g. `self_attn.q_proj.weight`, in the model's dtype."""

    index: int
    tensors: dict[str, torch.Tensor]

    def fused(self, names: tuple[str, ...], kind: str) -> torch.Tensor | None:
        """Concatenate the `weight` or `bias` of several projections along their outputs; None if they have none."""
        parts = [self.tensors[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in self.tensors]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by short name."""
    width, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "self_attn.q_proj": (q, width, config.qkv_bias),
        "self_attn.k_proj": (kv, width, config.qkv_bias),
        "self_attn.v_proj": (kv, width, config.qkv_bias),
        "self_attn.o_proj": (width, q, config.o_bias),
        "mlp.gate_proj": (inner, width, config.mlp_bias),
        "mlp.up_proj": (inner, width, config.mlp_bias),
        "mlp.down_proj": (width, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    for name, (outputs, inputs, bias) in sizes.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def top_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that belong to no layer."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBED: table, NORM: (config.hidden_size,)}
    return shapes if config.tie_embeddings else shapes | {HEAD: table}


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor of the checkpoint."""
    shapes = top_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def read_layers(
    source: ModelSource, config: LlamaConfig, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Iterator[LayerTensors]]:
    """Check the checkpoint, read its top tensors, and stream its layers one after another.

    Raises:
        EngineStartError: the tensors do not fit the configuration.
    """
    reader = source.open()
    tied_copy = config.tie_embeddings and HEAD in reader.shapes

    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied_copy and name == HEAD)

    if config.num_layers > len(reader.shapes):  # before a table of all names is made, which could be of any size
        raise EngineStartError(
            f"the weights in {source.path} do not fit their configuration: num_hidden_layers is {config.num_layers}, and "
            f"there are {len(reader.shapes)} tensors in all"
        )
    check_tensors(reader, expected_shapes(config), source.path, ignored)
    top = dict(read_tensors(reader, list(top_shapes(config)), dtype))

    def layers() -> Iterator[LayerTensors]:
        short = list(layer_shapes(config))
        names = [f"model.layers.{index}.{name}" for index in range(config.num_layers) for name in short]
        found: dict[str, torch.Tensor] = {}
        for place, (_, tensor) in enumerate(read_tensors(reader, names, dtype)):
            found[short[place % len(short)]] = tensor
            if len(found) == len(short):
                yield LayerTensors(place // len(short), found)
                found = {}
        reader.close()

    return top, layers()
