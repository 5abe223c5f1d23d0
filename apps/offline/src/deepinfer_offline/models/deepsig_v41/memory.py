"""How much memory a V4.1 model needs, from its configuration alone."""

from __future__ import annotations

import torch

from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.aside import ASIDE_ROWS
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.layers import packs_experts, takes_kernels
from deepinfer_offline.models.deepsig_v41.layout import TensorSpec, checkpoint_specs
from deepinfer_offline.models.deepsig_v41.schedule import Schedule

MAX_SCORES = 1 << 28
"""Indexer scores that `DeviceBackbone` holds at once, float32 elements: 1 GiB."""
DENSE_EXPERTS_LIMIT = 8 << 30  # bytes; packed experts beyond this stay FP4 and are unpacked when used

_LONG = 1 << 17  # positions that there is room for in every row of a step; longer sequences are few
_SCORED = 6  # bytes of an entry while it is scored on a device: the score, whether it is a candidate, and best ones
_EXPERT_ROWS = 8  # most rows that pad those of an expert

_FLOAT32_PARTS = (".gate.weight", ".gate.bias", ".attn_sink", "head.weight", ".confidence_head.proj.weight")


def _experts(config: V41Config, schedule: Schedule) -> int:
    """Values in all routed experts."""
    one = 3 * config.hidden_size * config.moe_intermediate_size
    draft = config.num_nextn_predict_layers * config.dspark_n_routed_experts
    return one * (len(schedule.layers) * config.n_routed_experts + draft)


def keeps_fp4(config: V41Config, schedule: Schedule, options: ModelOptions) -> bool:
    """Whether FP4 experts stay packed in memory: kernels read them so, and unpacked they would be large."""
    large = _experts(config, schedule) * options.dtype.itemsize > DENSE_EXPERTS_LIMIT
    return config.quantised and (large or packs_experts(config, options))


def _loaded_bytes(spec: TensorSpec, config: V41Config, dtype: torch.dtype, packed: bool) -> int:
    if spec.optional:
        return 0
    if spec.storage == "expert" and packed:
        return spec.count // 2 + spec.scale_shape[0] * spec.scale_shape[1]
    if spec.storage == "table" and config.quantised:
        return spec.count + spec.scale_shape[0] * spec.scale_shape[1]
    if spec.name.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return 4 * config.hc_mult * (config.hc_mult + 2)  # spread over the coefficients
    in_float32 = spec.name.endswith(_FLOAT32_PARTS) or ".hc_" in spec.name or spec.name.endswith(".wgate.weight")
    return spec.count * (4 if in_float32 else dtype.itemsize)


def dense_weight_bytes(config: V41Config, schedule: Schedule, options: ModelOptions) -> int:
    """Bytes of the loaded weights."""
    packed, specs = keeps_fp4(config, schedule, options), checkpoint_specs(config, schedule)
    return sum(_loaded_bytes(spec, config, options.dtype, packed) for spec in specs.values())


def workspace_bytes(config: V41Config, options: ModelOptions) -> int:
    """Peak bytes of one step beside weights and cache: streams and projections of every row, scores of one slab."""
    tokens, longest = options.max_step_tokens, options.max_model_len
    rows = _row_bytes(config, options, tokens)
    if takes_kernels(config, options):
        # All rows are as wide as the longest; which of their blocks are candidates is there in parts, then put together.
        scores = min(tokens * longest, max(MAX_SCORES, longest))
        return rows + _SCORED * scores + 2 * tokens * -(-longest // config.candidate_block_size)
    entries = tokens * min(longest, _LONG)  # only one sequence is longer at once
    return rows + 2 * entries + 4 * 4 * (1 << 24)


def graph_bytes(config: V41Config, options: ModelOptions) -> tuple[int, int]:
    """Peak bytes of the largest captured step, one of decode rows alone, and the part of it that `Aside` uses.

    0 where none is captured: only kernels that read packed experts leave the host no decision.
    """
    if not packs_experts(config, options):
        return 0, 0
    rows = min(options.max_running, ASIDE_ROWS)  # which score aside
    aside = _SCORED * captured_positions(options, rows)
    aside += rows * 4 * (4 * config.moe_intermediate_size + config.hidden_size)
    padding = _EXPERT_ROWS * config.n_routed_experts * 2 * (config.hidden_size + config.moe_intermediate_size)
    scores = _SCORED * captured_positions(options, options.max_running) if options.max_running > rows else 0
    return _row_bytes(config, options, options.max_running) + scores + padding + aside, aside


def captured_positions(options: ModelOptions, rows: int) -> int:
    """Most positions of all rows together in a captured step of so many. Each counts as the longest: scores are that wide."""
    most = min(options.max_running, ASIDE_ROWS) if rows <= ASIDE_ROWS else options.max_running
    return min(most * options.max_model_len, max(most, ASIDE_ROWS) * _LONG)


def _row_bytes(config: V41Config, options: ModelOptions, rows: int) -> int:
    """Streams, projections and logits of a step of so many tokens."""
    wide = max(
        config.num_attention_heads * config.head_dim,
        2 * config.moe_intermediate_size * config.num_experts_per_tok,
        config.index_n_heads * config.index_head_dim,
    )
    per_row = 4 * (3 * config.hc_mult * config.hidden_size + 4 * wide + 4 * config.hidden_size)
    return rows * per_row + 4 * config.vocab_size * options.max_running
