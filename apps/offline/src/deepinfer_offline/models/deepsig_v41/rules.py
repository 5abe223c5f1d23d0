"""What makes a V4.1 configuration consistent. Each check names its rule in the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deepinfer_offline.models.deepsig_v41 import config as cfg

if TYPE_CHECKING:
    from deepinfer_offline.models.deepsig_v41.config import RopeScaling, V41Config

_MOST = 1 << 48  # of any count: products of several may still be turned into a float
_LARGEST = 1e30  # of any other number; NaN and infinity are not below it
_MOST_EXPERTS = 1 << 17  # routed experts of a model in all: each has a name that is looked for. Flash has 15,744

_COUNTS = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
    "max_position_embeddings",
)  # fmt: skip
_REALS = (
    "swiglu_limit", "rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor"
)  # fmt: skip


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise cfg.ConfigError(f"inconsistent V4.1 configuration: {rule}")


def check(c: V41Config) -> None:
    """Raise ConfigError for the first rule that `c` breaks."""
    _check_types(c, "")
    _check_numbers(c)
    _check_attention(c)
    _check_experts(c)
    _check_schedule(c)
    _check_candidates(c)
    _check_engram(c)
    _check_draft(c)
    _check_size(c)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_scaling(scaling: RopeScaling) -> None:
    """Raise ConfigError for a value of `scaling` that is none."""
    _check_types(scaling, "rope_scaling.")
    for name in ("factor", "beta_fast", "beta_slow"):
        value = getattr(scaling, name)
        _require(value > 0, f"rope_scaling.{name} must be positive, got {value!r}")
    length = scaling.original_length
    _require(length >= 0, f"rope_scaling.original_max_position_embeddings must not be negative, got {length!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, f"a whole number of at most {_MOST}"),
    "float": (_is_number, f"a number of at most {_LARGEST:g}"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(map(_is_whole, value)),
        f"a list of whole numbers of at most {_MOST}",
    ),
}
_KEYS = {"original_length": "original_max_position_embeddings"}  # as a checkpoint spells them


def _check_types(config: V41Config | RopeScaling, prefix: str) -> None:
    """Check every value that has a simple type; the others check themselves."""
    for field in fields(config):
        kind, value = _TYPES.get(str(field.type)), getattr(config, field.name)
        if kind is not None and not kind[0](value):
            shown = list(value) if isinstance(value, tuple) else value
            raise cfg.ConfigError(f"{prefix}{_KEYS.get(field.name, field.name)} is {shown!r:.80}, must be {kind[1]}")


def _check_numbers(c: V41Config) -> None:
    _require(c.model_type in cfg.MODEL_TYPES, f"model_type must be one of {cfg.MODEL_TYPES}, got {c.model_type!r}")
    for name in _COUNTS:
        _require(_is_count(getattr(c, name)), f"{name} must be a positive integer, got {getattr(c, name)!r}")
    for name in _REALS:
        value = getattr(c, name)
        _require(value > 0, f"{name} must be finite and positive, got {value!r}")
    _require(not c.tie_word_embeddings, "tie_word_embeddings must be false: the head is a matrix of its own")


def _check_attention(c: V41Config) -> None:
    _require(c.num_key_value_heads == 1, f"num_key_value_heads must be 1 (shared latent), got {c.num_key_value_heads}")
    _require(
        c.num_attention_heads % c.o_groups == 0,
        f"num_attention_heads ({c.num_attention_heads}) must be a multiple of o_groups ({c.o_groups})",
    )
    narrow = min(c.head_dim, c.index_head_dim)
    _require(
        c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= narrow,
        f"qk_rope_head_dim ({c.qk_rope_head_dim}) must be even and at most head_dim and index_head_dim ({narrow})",
    )
    for name in ("head_dim", "index_head_dim"):
        value = getattr(c, name)
        _require(value % 2 == 0, f"{name} must be even, because two FP4 values share a byte; got {value}")


def _check_experts(c: V41Config) -> None:
    _require(c.hidden_act == "silu", f"hidden_act must be silu, got {c.hidden_act!r}")
    _require(c.scoring_func == "sqrtsoftplus", f"scoring_func must be sqrtsoftplus, got {c.scoring_func!r}")
    _require(c.topk_method == "noaux_tc", f"topk_method must be noaux_tc, got {c.topk_method!r}")
    _require(c.num_hash_layers == 0, f"num_hash_layers must be 0: V4.1 has no hash routing, got {c.num_hash_layers}")
    _require(c.n_shared_experts == 1, f"n_shared_experts must be 1, got {c.n_shared_experts}")
    _require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok ({c.num_experts_per_tok}) must not exceed n_routed_experts ({c.n_routed_experts})",
    )
    if c.quantised:
        for name in ("hidden_size", "moe_intermediate_size"):
            _require(getattr(c, name) % 2 == 0, f"{name} must be even, because two FP4 values share a byte")


def _check_ids(c: V41Config, name: str) -> None:
    ids = getattr(c, name)
    _require(all(_is_count(i, 0) for i in ids), f"{name} must hold non-negative integers, got {list(ids)}")
    _require(list(ids) == sorted(set(ids)), f"{name} must be strictly increasing, got {list(ids)}")
    _require(
        all(i < len(c.compress_ratios) for i in ids),
        f"{name} must name layers that compress_ratios covers ({len(c.compress_ratios)}), got {list(ids)}",
    )


def _check_schedule(c: V41Config) -> None:
    _require(all(_is_count(r, 0) for r in c.compress_ratios), "compress_ratios must hold non-negative integers")
    _require(
        len(c.compress_ratios) >= c.num_hidden_layers,
        f"compress_ratios must cover all {c.num_hidden_layers} layers, got {len(c.compress_ratios)} entries",
    )
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        _check_ids(c, name)
    missing = sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids))
    _require(not missing, f"every KV source must also be an index source; layers {missing} are not")
    owner = None
    for layer, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        source = layer in c.kv_source_layer_ids
        if ratio == 0:
            indexes = layer in c.index_source_layer_ids
            _require(not source and not indexes, f"layer {layer} has ratio 0, so it cannot be a KV or index source")
            continue
        owner = ratio if source else owner
        _require(owner == ratio, f"layer {layer} (ratio {ratio}) needs a KV source of the same ratio at or before it")


def _check_candidates(c: V41Config) -> None:
    source = c.candidate_source_layer_id
    _require(
        _is_count(source, -1) and isinstance(source, int),
        f"candidate_source_layer_id must be -1 (none) or a layer, got {source!r}",
    )
    if source < 0:
        return
    _require(source in c.kv_source_layer_ids, f"candidate_source_layer_id ({source}) must be a KV source")
    later = [i for i in c.kv_source_layer_ids if source < i < c.num_hidden_layers]
    _require(not later, f"no KV source may follow candidate_source_layer_id ({source}); layers {later} do")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        _require(_is_count(getattr(c, name)), f"{name} must be a positive integer, got {getattr(c, name)!r}")


def _check_engram(c: V41Config) -> None:
    _require(
        len(c.engram_layer_ids) == len(c.engram_num_embeddings),
        f"engram_num_embeddings must have one entry for each of the {len(c.engram_layer_ids)} Engram layers",
    )
    _require(
        all(_is_count(rows) for rows in c.engram_num_embeddings),
        f"engram_num_embeddings must hold positive integers, got {list(c.engram_num_embeddings)}",
    )
    if not c.active_engram_layers:
        return
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        _require(_is_count(getattr(c, name)), f"{name} must be a positive integer, got {getattr(c, name)!r}")
    _require(_is_count(c.engram_max_ngram_size, 2), "engram_max_ngram_size must be at least 2")
    _require(
        _is_count(c.engram_pad_token_id, 0) and c.engram_pad_token_id < c.vocab_size,
        f"engram_pad_token_id ({c.engram_pad_token_id}) must be below vocab_size ({c.vocab_size})",
    )


def _check_draft(c: V41Config) -> None:
    stages = c.num_nextn_predict_layers
    _require(_is_count(stages, 0), f"num_nextn_predict_layers must not be negative, got {stages!r}")
    if stages == 0:
        return
    ratios = c.compress_ratios[c.num_hidden_layers : c.num_hidden_layers + stages]
    _require(
        len(ratios) == stages and not any(ratios),
        f"compress_ratios must give ratio 0 to each of the {stages} draft stages after the layers, got {list(ratios)}",
    )
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        _require(_is_count(getattr(c, name)), f"{name} must be a positive integer, got {getattr(c, name)!r}")
    _require(
        c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
        f"dspark_num_experts_per_tok ({c.dspark_num_experts_per_tok}) must not exceed dspark_n_routed_experts",
    )
    _require(
        0 <= c.dspark_noise_token_id < c.vocab_size,
        f"dspark_noise_token_id ({c.dspark_noise_token_id}) must be below vocab_size ({c.vocab_size})",
    )
    targets = c.dspark_target_layer_ids
    _require(
        bool(targets)
        and targets[0] >= 0
        and list(targets) == sorted(set(targets))
        and targets[-1] < c.num_hidden_layers,
        f"dspark_target_layer_ids must be increasing layers below {c.num_hidden_layers}, got {list(targets)}",
    )


def _check_size(c: V41Config) -> None:
    """Refuse more experts than a table of all tensor names could hold, before one is made."""
    drafts = c.num_nextn_predict_layers * c.dspark_n_routed_experts
    _require(
        c.num_hidden_layers * c.n_routed_experts + drafts <= _MOST_EXPERTS,
        f"n_routed_experts ({c.n_routed_experts}) in {c.num_hidden_layers} layers and dspark_n_routed_experts "
        f"({c.dspark_n_routed_experts}) in {c.num_nextn_predict_layers} draft stages must be at most {_MOST_EXPERTS} in all",
    )
