"""The V4.1 configuration, read from a checkpoint's `config.json` and checked at construction."""

from __future__ import annotations

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

    def __post_init__(self) -> None:
        from deepinfer_offline.models.deepsig_v41 import rules

        rules.check_scaling(self)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> RopeScaling:
        """Read a `rope_scaling` mapping; a value that is null is as one that is missing.

        Raises:
            ConfigError: a scheme that there is not, or a value that is no number.
        """
        given = {name: value for name, value in raw.items() if value is not None}
        kind = given.get("rope_type", given.get("type", "yarn"))
        if kind not in ("yarn", "default"):
            raise ConfigError(f"rope_scaling: rope_type is {kind!r:.80}, must be yarn or default")
        if kind == "default":
            return cls()
        return cls(
            factor=given.get("factor", 1.0),
            beta_fast=given.get("beta_fast", 32.0),
            beta_slow=given.get("beta_slow", 1.0),
            original_length=given.get("original_max_position_embeddings", 0),
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
        text = _object(raw.get("text_config"), "text_config") or raw
        values = {f.name: _plain(text[f.name]) for f in fields(cls) if text.get(f.name) is not None}
        for name in ("model_type", "image_token_id", "tie_word_embeddings"):
            if raw.get(name) is not None:
                values[name] = raw[name]
        scaling = text.get("rope_scaling")
        values["rope_scaling"] = (
            _RELEASED_SCALING if scaling is None else RopeScaling.parse(_object(scaling, "rope_scaling"))
        )
        values["dtype"] = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "bfloat16"
        values["vision_layers"] = _vision_layers(raw)
        values["quantised"] = _is_quantised(raw, text)
        if values.get("engram_layer_ids") == ():
            values.setdefault("engram_num_embeddings", ())
        return cls(**values)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r:.80}, must be an object")
    return value or {}


def _vision_layers(raw: Mapping[str, Any]) -> int:
    """Layers of the vision tower; 0 without one."""
    vision = _object(raw.get("vision_config"), "vision_config")
    layers = vision.get("num_hidden_layers")
    if layers is None:
        return 32 if "vision_config" in raw else 0
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 0:
        raise ConfigError(f"vision_config.num_hidden_layers is {layers!r:.80}, must be a whole number of at least 0")
    return layers


def _is_quantised(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is quantised, which it can be in one way only."""
    found = raw.get("quantization_config")
    found = text.get("quantization_config") if found is None else found
    if found is None:
        return False
    found = _object(found, "quantization_config")
    expected = {"quant_method": ("fp8",), "scale_fmt": ("ue8m0", None), "expert_dtype": ("fp4", None)}
    for name, allowed in expected.items():
        if found.get(name) not in allowed:
            raise ConfigError(f"quantization_config.{name} is {found.get(name)!r:.80}, must be {allowed[0]!r}")
    block = found.get("weight_block_size", [32, 32])
    if block != [32, 32]:
        raise ConfigError(f"quantization_config.weight_block_size is {block!r:.80}, must be [32, 32]")
    return True
