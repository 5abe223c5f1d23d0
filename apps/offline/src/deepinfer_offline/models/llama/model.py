"""The forward of Llama-family models: SmolLM2, Llama 2/3, Qwen2.5 and Qwen3 (dense)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from deepinfer_offline.models.base import (
    CacheGroup,
    DraftChooser,
    DraftedBlocks,
    ForwardBatch,
    ModelFacts,
    ModelOptions,
)
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.draft import (
    LlamaDraft,
    draft_block_bytes,
    draft_config,
    draft_context_bytes,
    draft_stage_bytes,
    draft_weight_bytes,
)
from deepinfer_offline.models.llama.layer import LayerOps, LlamaLayer, captures_steps
from deepinfer_offline.models.llama.weights import EMBED, HEAD, NORM, layer_shapes, read_layers, top_shapes
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.products import LayerWidths, Stream
from deepinfer_offline.ops.rope import rope_table
from deepinfer_offline.weights.loading import run_in_thread
from deepinfer_offline.weights.source import ModelSource


@dataclass(slots=True)
class LlamaCache:
    """One opaque cache a layer, whose layout belongs to the attention provider, and the draft's pools by draft layer."""

    layers: list[Any]
    draft: tuple[torch.Tensor, ...] = ()


class LlamaModel:
    """A loaded Llama-family model. See `deepinfer_offline.models.base.Model`."""

    default_block_size = 32
    """Positions of a block where the user names none: what the CPU kernels read at once."""
    draft_group = GROUP

    def __init__(self, config: LlamaConfig, options: ModelOptions, top: dict[str, torch.Tensor], ops: LayerOps) -> None:
        self.config, self.options, self.ops = config, options, ops
        self.facts, self.notes = LlamaModel._facts(config, options), ops.notes
        self.embedding = top[EMBED]
        self.norm = top[NORM]
        self.head = ops.linear(top.get(HEAD, top[EMBED]), None)
        self.layers: list[LlamaLayer] = []
        self.draft: LlamaDraft | None = None
        self.rope = rope_table(config.rope, options.max_model_len + 1, options.device)

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelFacts:
        return cls._facts(LlamaConfig.parse(config), options)

    @classmethod
    def load(cls, source: ModelSource, options: ModelOptions) -> LlamaModel:
        return run_in_thread(lambda: cls._load(source, options))

    @classmethod
    def _load(cls, source: ModelSource, options: ModelOptions) -> LlamaModel:
        config = LlamaConfig.parse(source.config)
        ops = LayerOps.select(attention_shape(config, options), _layer_widths(config))
        with torch.inference_mode():
            top, layers = read_layers(source, config, options.dtype)
            model = cls(config, options, {name: t.to(options.device) for name, t in top.items()}, ops)
            del top
            for layer in layers:
                model.layers.append(LlamaLayer.build(layer, config, ops, options.device))
            if options.draft is not None:
                model.draft = LlamaDraft.load(options.draft, config, options)
        return model

    def allocate_cache(self, num_blocks: Mapping[str, int]) -> LlamaCache:
        layers = [self.ops.attention.allocate(num_blocks[GROUP]) for _ in self.layers]
        return LlamaCache(layers, () if self.draft is None else self.draft.allocate(num_blocks[GROUP]))

    @property
    def page_layout(self) -> str:
        """See `deepinfer_offline.engine.native.pages.PagedModel`."""
        draft = "" if self.draft is None else f"/dspark-{self.draft.digest}"
        return f"llama/{self.ops.attention.layout}{draft}"

    def page_blocks(self, cache: LlamaCache) -> dict[str, tuple[torch.Tensor, ...]]:
        """See `deepinfer_offline.engine.native.pages.PagedModel`."""
        return {GROUP: (*(self.ops.attention.blocks(layer) for layer in cache.layers), *cache.draft)}

    def capture_limit(self, rows: int, longest: int) -> int | None:
        """See `deepinfer_offline.models.base.Capturable`: one graph serves every length, if the attention can be captured."""
        return self.options.max_model_len if getattr(self.ops.attention, "captures", False) else None

    @property
    def captures_prompts(self) -> bool:
        """See `deepinfer_offline.models.base.CapturesPrompts`: attention that takes bounds is all it needs."""
        return self.capture_limit(1, 1) is not None and self.takes_bounds

    @property
    def takes_bounds(self) -> bool:
        """See `deepinfer_offline.models.base.TakesBounds`: whether the attention does; nothing else looks at lengths."""
        return getattr(self.ops.attention, "takes_bounds", False)

    def forward(self, batch: ForwardBatch, cache: LlamaCache) -> torch.Tensor:
        prepared = self.ops.attention.prepare(batch, self.rope)
        stream = Stream(self.embedding[batch.token_ids])
        features = self._tap([], -1, stream.hidden)
        for index, (layer, following) in enumerate(pairwise(self.layers)):
            stream = layer(stream, cache.layers[index], prepared, following.attention_norm)
            self._tap(features, index, stream.hidden)
        hidden = self.layers[-1].last(stream, cache.layers[-1], prepared, self._wanted(batch))
        if self.draft is not None:
            self.draft.write_context(torch.cat(features, dim=-1), batch, cache.draft)
        return self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.wide(hidden)

    @property
    def draft_width(self) -> int:
        """See `deepinfer_offline.models.base.DraftsBlocks`."""
        return 0 if self.draft is None else self.draft.config.block_size

    def start_drafting(self) -> None:
        """See `deepinfer_offline.models.base.DraftsBlocks`: a draft that was loaded always has its context written."""

    def draft_blocks(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        cache: LlamaCache,
        choose: DraftChooser,
        longest: int,
    ) -> DraftedBlocks:
        """See `deepinfer_offline.models.base.DraftsBlocks`."""
        return self.finish_blocks(self.draft_states(anchors, positions, tables, cache, longest), anchors, choose)

    def draft_states(
        self, anchors: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, cache: LlamaCache, longest: int
    ) -> torch.Tensor:
        """See `deepinfer_offline.models.base.CapturesBlocks`."""
        assert self.draft is not None, "no draft was loaded"
        return self.draft.parallel(anchors, positions, tables, cache.draft, self.embedding, longest)

    def finish_blocks(self, hidden: torch.Tensor, anchors: torch.Tensor, choose: DraftChooser) -> DraftedBlocks:
        """See `deepinfer_offline.models.base.CapturesBlocks`."""
        assert self.draft is not None, "no draft was loaded"
        if hidden[..., 0].numel() <= self.options.max_running:
            columns = self.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]).unbind(1)
        else:  # logits of no more tokens at once than may run
            columns = (self.logits(column) for column in hidden.transpose(0, 1).contiguous())
        return self.draft.sequential(columns, hidden, anchors, choose)

    def _tap(self, features: list[torch.Tensor], layer: int, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Keep the output of a tapped layer: a copy, since the next layer may overwrite it."""
        if self.draft is not None and layer in self.draft.taps:
            features.append(hidden.clone())
        return features

    def _wanted(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Token rows that leave the last layer; None for all of them, in order."""
        return None if len(batch.host.logit_rows) == len(batch.token_ids) else batch.logit_rows

    @staticmethod
    def _facts(config: LlamaConfig, options: ModelOptions) -> ModelFacts:
        size = options.dtype.itemsize
        top, layer = (sum(map(_count, shapes(config).values())) for shapes in (top_shapes, layer_shapes))
        weights = (top + config.num_layers * layer) * size
        if config.tie_embeddings:
            weights += config.vocab_size * config.hidden_size * size  # packed again as the output head
        tokens, rows = options.max_step_tokens, options.max_running
        widths = 4 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_heads * config.head_dim
        logits = rows * config.vocab_size * (4 + size)
        token, stage, drafts = widths * size, 0, 0
        shape = attention_shape(config, options)
        block_bytes = shape.block_bytes * config.num_layers
        if options.draft is not None:
            draft = draft_config(options.draft, config)
            block_bytes += draft_block_bytes(draft, options)
            weights += draft_weight_bytes(draft, options)
            kept, writing = draft_context_bytes(draft, options)
            token = max(token + kept, 4 * config.hidden_size * size + writing)
            stage, drafts = draft_stage_bytes(draft, options), draft.block_size
        workspace = tokens * token + (2 + drafts) * logits + stage
        # Of captured steps those with prompts leave logits out, and others have logits of no more tokens at once than rows.
        graphs = max(tokens * token, rows * token + logits + stage)
        group = CacheGroup(GROUP, "prefix", options.block_size, block_bytes)
        return ModelFacts(
            config.model_type,
            config.vocab_size,
            config.max_positions,
            weights,
            workspace,
            (group,),
            config.dtype,
            graph_bytes=graphs if captures_steps(shape) else 0,
        )


def attention_shape(config: LlamaConfig, options: ModelOptions) -> AttentionShape:
    """The attention that this model needs."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=options.block_size,
        dtype=options.dtype,
        device=options.device,
        norm_eps=config.rms_norm_eps,
    )


def _layer_widths(config: LlamaConfig) -> LayerWidths:
    bias = config.qkv_bias or config.o_bias or config.mlp_bias
    return LayerWidths(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, bias)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
