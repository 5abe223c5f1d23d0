"""One decoder layer, and the ops it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.weights import LayerTensors
from deepinfer_offline.ops import linear, norm  # noqa: F401 - registers the providers
from deepinfer_offline.ops.attention import portable  # noqa: F401
from deepinfer_offline.ops.attention.base import Attention, AttentionShape
from deepinfer_offline.ops.cpu import providers as cpu_providers  # noqa: F401
from deepinfer_offline.ops.cuda import providers as cuda_providers  # noqa: F401
from deepinfer_offline.ops.linear import Linear
from deepinfer_offline.ops.products import LayerWidths, Products, Stream
from deepinfer_offline.ops.registry import registry, slower_notes

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_NOTED = ("linear", "paged_attention", "rms_norm", "silu_mul")


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The chosen implementations. `linear(weight, bias)` packs a layer's weight; `notes` say what faster ones are missed."""

    linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    products: Products
    attention: Attention
    notes: tuple[str, ...] = ()

    @classmethod
    def select(cls, shape: AttentionShape, widths: LayerWidths) -> LayerOps:
        """The best provider of each op for the shape's device and dtype."""

        def load(op: str, detail: Any = shape) -> Any:
            return registry.select(op, shape.device, shape.dtype, detail=detail).load()

        rms_norm = load("rms_norm")
        multiply = load("products", widths)(rms_norm, load("silu_mul"))
        missed = {op: registry.missed(op, shape.device, shape.dtype, shape) for op in _NOTED}
        return cls(load("linear"), rms_norm, multiply, load("paged_attention")(shape), slower_notes(missed))


def captures_steps(shape: AttentionShape) -> bool:
    """Whether the attention of a shape will be one that a CUDA graph can repeat."""
    if torch.device(shape.device).type != "cuda":
        return False
    chosen = registry.select("paged_attention", shape.device, shape.dtype, detail=shape)
    return getattr(chosen.load(), "captures", False)


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights and forward of one layer."""

    ops: LayerOps
    eps: float
    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    @classmethod
    def build(cls, layer: LayerTensors, config: LlamaConfig, ops: LayerOps, device: str) -> LlamaLayer:
        """Fuse and pack a layer's tensors on the device."""

        def pack(*names: str) -> Linear:
            weight, bias = layer.fused(names, "weight"), layer.fused(names, "bias")
            assert weight is not None, f"layer {layer.index} has no weights {names}"
            return ops.linear(weight.to(device), None if bias is None else bias.to(device))

        def vector(name: str) -> torch.Tensor | None:
            found = layer.tensors.get(f"{name}.weight")
            return None if found is None else found.to(device)

        attention_norm, mlp_norm = vector("input_layernorm"), vector("post_attention_layernorm")
        assert attention_norm is not None
        assert mlp_norm is not None
        return cls(
            ops=ops,
            eps=config.rms_norm_eps,
            attention_norm=attention_norm,
            qkv=pack(*_QKV),
            output=pack("self_attn.o_proj"),
            mlp_norm=mlp_norm,
            gate_up=pack(*_GATE_UP),
            down=pack("mlp.down_proj"),
            q_norm=vector("self_attn.q_norm"),
            k_norm=vector("self_attn.k_norm"),
        )

    def __call__(self, x: Stream, cache: Any, prepared: Any, next_norm: torch.Tensor) -> Stream:
        """[T, hidden] -> [T, hidden], on its way to the norm of the next layer; writes the layer's cache."""
        return self._mlp(x.hidden, self._attend(x, cache, prepared), next_norm)

    def last(self, x: Stream, cache: Any, prepared: Any, wanted: torch.Tensor | None) -> torch.Tensor:
        """The same for the last layer: after attention only the wanted token rows (int64 [n], or all) go on."""
        hidden, attended = x.hidden, self._attend(x, cache, prepared)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        return self._mlp(hidden, attended, None).hidden

    def _attend(self, x: Stream, cache: Any, prepared: Any) -> torch.Tensor:
        qkv = self.ops.products.normed(self.qkv, x, self.attention_norm, self.eps)
        return self.ops.attention(qkv, cache, prepared, self.q_norm, self.k_norm)

    def _mlp(self, hidden: torch.Tensor, attended: torch.Tensor, next_norm: torch.Tensor | None) -> Stream:
        multiply = self.ops.products
        x = multiply.added(self.output, hidden, attended, self.mlp_norm)
        inner = multiply.gated(self.gate_up, x, self.mlp_norm, self.eps)
        return multiply.added(self.down, x.hidden, inner, next_norm)
