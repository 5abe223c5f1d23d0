"""Configuration of Llama-family checkpoints, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.ops.rope import ROPE_TYPES, RopeConfig


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Names follow the checkpoint's config.json.

    `qkv_bias`, `o_bias`: the projections have a bias. `qk_norm`: queries and keys are normalised per head (Qwen3).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face configuration.

        Raises:
            EngineStartError: a field is missing, or asks for something that this family does not have here.
        """
        model_type = str(raw.get("model_type"))
        _refuse(raw, model_type)
        heads = _positive(raw, "num_attention_heads")
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        hidden = _positive(raw, "hidden_size")
        head_dim = int(raw.get("head_dim") or hidden // heads)
        if kv_heads < 1 or heads % kv_heads:
            raise EngineStartError(
                f"config: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )
        bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=_positive(raw, "max_position_embeddings"),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias and model_type != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            rope=parse_rope(raw, head_dim),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )


def parse_rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding of a config: `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old)."""
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise EngineStartError(f"config: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    theta = found.get("rope_theta") or raw.get("rope_theta") or 10000.0
    trained = found.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    try:
        return RopeConfig(
            head_dim=head_dim,
            theta=float(theta),
            kind=kind,
            factor=float(found.get("factor", 1.0)),
            original_positions=int(trained or raw.get("max_position_embeddings") or 0),
            low_freq_factor=float(found.get("low_freq_factor", 1.0)),
            high_freq_factor=float(found.get("high_freq_factor", 4.0)),
            beta_fast=float(found.get("beta_fast") or 32.0),
            beta_slow=float(found.get("beta_slow") or 1.0),
            attention_factor=float(found.get("attention_factor") or 0.0),
            divisors=found.get("divisors"),
        )
    except ValueError as error:
        raise EngineStartError(f"config: {error}") from error


def _refuse(raw: Mapping[str, Any], model_type: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise EngineStartError(f"config: hidden_act {activation!r} is not supported; Llama-family models use 'silu'")
    layers = raw.get("layer_types") or []
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in layers):
        raise EngineStartError(f"config: sliding-window layers of {model_type} are not supported by the native engine")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise EngineStartError(f"config: {model_type} weights quantised by {method!r} are not supported")
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise EngineStartError("config: partial_rotary_factor other than 1 is not supported")


def _positive(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise EngineStartError(f"config: {name} is {value!r}, must be a whole number of at least 1")
    return value
