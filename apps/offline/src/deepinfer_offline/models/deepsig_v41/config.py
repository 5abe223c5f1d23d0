"""The V4.1 configuration, read from a checkpoint's `config.json` and checked at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepinfer_offline.engine.base import EngineStartError

MODEL_TYPES = ("deepseek_v41", "deepsig_v41")


class ConfigError(EngineStartError):
    """A configuration that is not a consistent V4.1 model. The message names the rule it breaks."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency-only YaRN of the compressed layers; `original_length` 0 switches it off."""

    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_length: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> RopeScaling:
        kind = raw.get("rope_type", raw.get("type", "yarn"))
        if kind not in ("yarn", "default"):
            raise ConfigError(f"rope_scaling: rope_type is {kind!r}, must be yarn or default")
        if kind == "default":
            return cls()
        return cls(
            factor=float(raw.get("factor", 1.0)),
            beta_fast=float(raw.get("beta_fast", 32)),
            beta_slow=float(raw.get("beta_slow", 1)),
            original_length=int(raw.get("original_max_position_embeddings", 0)),
        )


_RELEASED_SCALING = RopeScaling(factor=16.0, original_length=65536)


@dataclass(frozen=True, slots=True)
class V41Config:
    """Names and meanings follow the checkpoint's `text_config`. Defaults are those of the released Flash model.

    `compress_ratios` has one entry for each layer, then one for each draft stage. `quantised` says whether projections are
    stored as FP8 tiles and experts as FP4 (`quantization_config`), or everything in `dtype`.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = _RELEASED_SCALING
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    num_hash_layers: int = 0
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    model_type: str = "deepseek_v41"
    dtype: str = "bfloat16"
    image_token_id: int = 129264
    vision_layers: int = 0
    quantised: bool = False

    def __post_init__(self) -> None:
        from deepinfer_offline.models.deepsig_v41 import rules

        rules.check(self)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def engram_hash_heads(self) -> int:
        """Table rows that one position reads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def active_engram_layers(self) -> tuple[int, ...]:
        return tuple(i for i in self.engram_layer_ids if i < self.num_hidden_layers)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> V41Config:
        """Read a `config.json` mapping; `text_config` may be nested or its fields may lie at the top.

        Raises:
            ConfigError: naming the rule that the configuration breaks.
        """
        text = raw.get("text_config") or raw
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config must be an object, got {type(text).__name__}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in text and text[field.name] is not None:
                values[field.name] = text[field.name]
        for name in ("model_type", "image_token_id", "tie_word_embeddings"):
            if raw.get(name) is not None:
                values[name] = raw[name]
        scaling = text.get("rope_scaling")
        values["rope_scaling"] = _RELEASED_SCALING if scaling is None else RopeScaling.parse(scaling)
        values["dtype"] = str(text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "bfloat16")
        vision = _object(raw.get("vision_config"), "vision_config").get("num_hidden_layers", 32)
        if not isinstance(vision, int):
            raise ConfigError(f"vision_config.num_hidden_layers is {vision!r:.80}, must be a whole number")
        values["vision_layers"] = vision if "vision_config" in raw else 0
        values["quantised"] = raw.get("quantization_config") is not None or text.get("quantization_config") is not None
        _check_quantisation(raw.get("quantization_config") or text.get("quantization_config"))
        if values.get("engram_layer_ids") is not None and "engram_num_embeddings" not in values:
            values["engram_num_embeddings"] = () if not values["engram_layer_ids"] else cls.engram_num_embeddings
        return cls(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r:.80}, must be an object")
    return value or {}


def _check_quantisation(raw: Any) -> None:
    if raw is None:
        return
    raw = _object(raw, "quantization_config")
    expected = {"quant_method": ("fp8",), "scale_fmt": ("ue8m0", None), "expert_dtype": ("fp4", None)}
    for name, allowed in expected.items():
        if raw.get(name) not in allowed:
            raise ConfigError(f"quantization_config.{name} is {raw.get(name)!r}, must be {allowed[0]!r}")
    block = raw.get("weight_block_size", [32, 32])
    if block != [32, 32]:
        raise ConfigError(f"quantization_config.weight_block_size is {block}, must be [32, 32]")


def finite_positive(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
