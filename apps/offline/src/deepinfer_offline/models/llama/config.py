"""Configuration of Llama-family checkpoints, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.ops.rope import ROPE_TYPES, RopeConfig

_MOST = 1 << 48  # of any count: products of two may still be multiplied by a position
_LARGEST = 1e30  # of any number in a configuration; NaN and infinity are not below it


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
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        hidden = _positive(raw, "hidden_size")
        head_dim = _positive(raw, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise EngineStartError(
                f"config: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )
        bias = _flag(raw, "attention_bias")
        return cls(
            model_type=model_type,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(raw, "rms_norm_eps") if "rms_norm_eps" in raw else 1e-6,
            max_positions=_positive(raw, "max_position_embeddings"),
            tie_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias and model_type != "qwen2",
            mlp_bias=_flag(raw, "mlp_bias"),
            qk_norm=model_type == "qwen3",
            rope=parse_rope(raw, head_dim),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )


def parse_rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding of a config: `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old).

    Raises:
        EngineStartError: a scheme that there is not, or a value that is none.
    """
    found = _object(raw, "rope_parameters") or _object(raw, "rope_scaling")
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise EngineStartError(f"config: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    trained = _positive(raw, "original_max_position_embeddings", _positive(raw, "max_position_embeddings"))
    try:
        return RopeConfig(
            head_dim=head_dim,
            theta=_number(found, "rope_theta", _number(raw, "rope_theta", 10000.0)),
            kind=kind,
            factor=_number(found, "factor", 1.0),
            original_positions=_positive(found, "original_max_position_embeddings", trained),
            low_freq_factor=_number(found, "low_freq_factor", 1.0),
            high_freq_factor=_number(found, "high_freq_factor", 4.0),
            beta_fast=_number(found, "beta_fast", 32.0),
            beta_slow=_number(found, "beta_slow", 1.0),
            attention_factor=_number(found, "attention_factor", 0.0),
            divisors=_divisors(found, head_dim),
        )
    except ValueError as error:
        raise EngineStartError(f"config: {error}") from error


def _divisors(found: Mapping[str, Any], head_dim: int) -> list[float] | None:
    values = found.get("divisors")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != head_dim // 2 or not all(_is_number(v) and v > 0 for v in values):
        raise EngineStartError(f"config: divisors of rope must be {head_dim // 2} numbers above 0, got {values!r:.80}")
    return values


def _refuse(raw: Mapping[str, Any], model_type: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise EngineStartError(f"config: hidden_act {activation!r} is not supported; Llama-family models use 'silu'")
    layers = raw.get("layer_types") or []
    if not isinstance(layers, list):
        raise EngineStartError(f"config: layer_types is {layers!r:.80}, must be a list")
    if _flag(raw, "use_sliding_window") or any(kind != "full_attention" for kind in layers):
        raise EngineStartError(f"config: sliding-window layers of {model_type} are not supported by the native engine")
    if raw.get("quantization_config"):
        method = _object(raw, "quantization_config").get("quant_method")
        raise EngineStartError(f"config: {model_type} weights quantised by {method!r} are not supported")
    if _number(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise EngineStartError("config: partial_rotary_factor other than 1 is not supported")


# --- values, where null is what is missing ---------------------------------------------------------------------------


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise EngineStartError(f"config: {name} is {value!r:.80}, must be a whole number from 1 to {_MOST}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if not _is_number(value) or value < 0:
        raise EngineStartError(f"config: {name} is {value!r:.80}, must be a number of at least 0")
    return float(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise EngineStartError(f"config: {name} is {value!r:.80}, must be true or false")
    return bool(value)


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise EngineStartError(f"config: {name} is {value!r:.80}, must be an object")
    return value or {}
