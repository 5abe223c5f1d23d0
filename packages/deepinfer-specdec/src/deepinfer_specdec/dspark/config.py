"""Sizes and choices of a DSpark draft, as in the `config.json` of public DeepSpec checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_specdec.errors import CheckpointError

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """A draft with a Qwen3/Llama-style backbone.

    Attributes:
        vocab_size: of the target; embedding and LM head are the target's.
        hidden_size: of target and draft.
        intermediate_size: of the MLPs.
        num_layers: draft layers.
        num_heads, num_kv_heads, head_dim: attention.
        taps: target layers whose outputs are read, ascending, -1 for the embedding; not the last target layer.
        num_target_layers: layers of the target.
        block_size: tokens of a draft (gamma).
        mask_token_id: fills the block behind the anchor.
        markov_kind: `vanilla`, `gated` or `rnn`.
        markov_rank: width of the sequential head; 0 for none: all columns are drafted from the parallel stage alone.
        confidence_head: whether the draft says how sure it is; without, a column is as sure as it has proved in the last blocks.
        confidence_with_markov: whether that head reads the previous token's row of the sequential head too.
        rms_eps, rope_theta: as in the target.
        qk_norm: RMS norm on queries and keys (Qwen3) or not (Llama).
        window: context positions that a draft attends to; 0 for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    num_target_layers: int
    block_size: int = 7
    mask_token_id: int = 0
    markov_kind: str = "vanilla"
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    rms_eps: float = 1e-6
    rope_theta: float = 1e6
    qk_norm: bool = True
    window: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_kv_heads {self.num_kv_heads}; allowed: a divisor of num_heads {self.num_heads}")
        if not self.taps or list(self.taps) != sorted(set(self.taps)):
            raise CheckpointError(f"taps {self.taps}; allowed: ascending layer numbers, at least one")
        if self.taps[0] < -1 or self.taps[-1] >= self.num_target_layers - 1:
            # The last layer's output is what the draft has to predict from scratch; tapping it leaks the answer in training.
            raise CheckpointError(f"taps {self.taps}; allowed: -1 (embedding)..{self.num_target_layers - 2}")
        if self.markov_kind not in MARKOV_KINDS:
            raise CheckpointError(f"markov_kind {self.markov_kind!r}; allowed: {', '.join(MARKOV_KINDS)}")
        if self.markov_rank < 0:
            raise CheckpointError(f"markov_rank {self.markov_rank}; allowed: >= 0")
        if not self.markov_rank and self.confidence_head and self.confidence_with_markov:
            raise CheckpointError(
                "confidence_head_with_markov true with markov_rank 0; allowed: false, or a rank above 0"
            )
        if self.block_size < 1:
            raise CheckpointError(f"block_size {self.block_size}; allowed: >= 1")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DSparkConfig:
        """Read a DeepSpec `config.json`. Raises CheckpointError naming a missing field."""
        inner = raw.get("dflash_config") or raw.get("dspark_config") or {}
        merged = {**raw, **inner}
        try:
            heads = merged["num_attention_heads"]
            return cls(
                vocab_size=merged["vocab_size"],
                hidden_size=merged["hidden_size"],
                intermediate_size=merged["intermediate_size"],
                num_layers=merged["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=merged.get("num_key_value_heads", heads),
                head_dim=merged.get("head_dim") or merged["hidden_size"] // heads,
                taps=tuple(merged["target_layer_ids"]),
                num_target_layers=merged["num_target_layers"],
                block_size=merged.get("block_size", 7),
                mask_token_id=merged["mask_token_id"],
                markov_kind=merged.get("markov_head_type", "vanilla"),
                markov_rank=merged.get("markov_rank", 256),
                confidence_head=bool(merged.get("enable_confidence_head", True)),
                confidence_with_markov=bool(merged.get("confidence_head_with_markov", True)),
                rms_eps=merged.get("rms_norm_eps", 1e-6),
                rope_theta=_rope_theta(merged),
                qk_norm=str(merged.get("model_type", "qwen3")).startswith("qwen3"),
                window=merged.get("sliding_window") or 0 if merged.get("use_sliding_window") else 0,
            )
        except KeyError as error:
            raise CheckpointError(f"the draft's config.json has no field {error.args[0]!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "target_layer_ids": list(self.taps),
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "markov_head_type": self.markov_kind,
            "markov_rank": self.markov_rank,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_with_markov,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "sliding_window": self.window or None,
            "use_sliding_window": bool(self.window),
        }


def _rope_theta(raw: dict[str, Any]) -> float:
    return float(raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta", 1e6))
