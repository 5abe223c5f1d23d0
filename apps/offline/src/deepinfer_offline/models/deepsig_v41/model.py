"""DeepSig V4.1 behind the native engine's `Model` protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import DraftChooser, DraftedBlocks, ForwardBatch, ModelFacts, ModelOptions
from deepinfer_offline.models.deepsig_v41.backbone import Counters
from deepinfer_offline.models.deepsig_v41.cache import WINDOW, CacheSpec, V41Cache, allocate, block_views
from deepinfer_offline.models.deepsig_v41.checkpoint import FolderReader, engram_token_map
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.draft import Draft
from deepinfer_offline.models.deepsig_v41.engram import EngramHash
from deepinfer_offline.models.deepsig_v41.layers import choose_layers, layer_notes, pack_experts, packs_experts
from deepinfer_offline.models.deepsig_v41.loader import TensorReader, WeightLoader
from deepinfer_offline.models.deepsig_v41.memory import (
    captured_positions,
    dense_weight_bytes,
    graph_bytes,
    keeps_fp4,
    workspace_bytes,
)
from deepinfer_offline.models.deepsig_v41.replay import DECODER_REPLAYS, DecoderReplay
from deepinfer_offline.models.deepsig_v41.schedule import Schedule, plan_layers
from deepinfer_offline.models.deepsig_v41.stage import Frequencies
from deepinfer_offline.models.deepsig_v41.weights import ModelWeights
from deepinfer_offline.ops.deepsig import LAYOUT_VERSION

if TYPE_CHECKING:
    from deepinfer_offline.weights.source import ModelSource


@dataclass(frozen=True, slots=True)
class V41Parts:
    """A parsed checkpoint configuration and what follows from it."""

    config: V41Config
    schedule: Schedule
    spec: CacheSpec

    @classmethod
    def of(cls, raw: Mapping[str, Any], block_size: int) -> V41Parts:
        config = V41Config.parse(raw)
        schedule = plan_layers(config)
        return cls(config, schedule, CacheSpec.of(config, schedule, block_size))


class DeepSigV41Model:
    """A loaded V4.1 model.

    Args:
        parts: the configuration.
        weights: from `WeightLoader`.
        options: how the engine runs it.
        token_map: int64 [tokens], from `compressed_token_map`; needed when the model has Engram layers.
        decoder_replay: see `Backbone`.
    """

    draft_group = WINDOW

    def __init__(
        self,
        parts: V41Parts,
        weights: ModelWeights,
        options: ModelOptions,
        token_map: np.ndarray | None = None,
        decoder_replay: DecoderReplay = "paper",
    ) -> None:
        self.config, self.schedule, self.spec = parts.config, parts.schedule, parts.spec
        self.weights, self.options = weights, options
        self.facts, self.notes = facts_of(parts, options), layer_notes(parts.config, options)
        frequencies = Frequencies.of(parts.config, options.device)
        engram = None
        if parts.config.active_engram_layers:
            assert token_map is not None, "a model with Engram layers needs the tokenizer's token map"
            engram = EngramHash(parts.config, token_map, options.device)
        layers = choose_layers(parts.config, options)
        self.backbone = layers(parts.config, parts.schedule, weights, frequencies, engram, "paper", options.block_size)
        self.decoder_replay = decoder_replay
        self._head = _exact_head(weights, options)
        self.draft = (
            Draft(parts.config, weights, frequencies, options.block_size) if weights.draft is not None else None
        )
        self.drafting = False  # whether steps also write the draft's context; set before the first step

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelFacts:
        """Facts from the configuration alone.

        Raises:
            ConfigError: it is inconsistent.
            EngineStartError: a draft model was given.
        """
        if options.draft is not None:
            raise EngineStartError(
                f"--draft-model {options.draft}: a V4.1 checkpoint brings its own draft; leave it out"
            )
        return facts_of(V41Parts.of(config, options.block_size), options)

    @classmethod
    def load(cls, source: ModelSource, options: ModelOptions) -> DeepSigV41Model:
        """Read a checkpoint folder.

        Raises:
            ConfigError: the configuration is inconsistent.
            LayoutError: tensors are missing, unexpected or misshapen.
            EngineStartError: the tokenizer that Engram needs is absent, or not the model's own.
        """
        reader = FolderReader(source)
        try:
            token_map = engram_token_map(source, V41Config.parse(source.config))
            return cls.from_reader(source.config, reader, options, token_map)
        finally:
            reader.close()

    @classmethod
    def from_reader(
        cls,
        raw: Mapping[str, Any],
        reader: TensorReader,
        options: ModelOptions,
        token_map: np.ndarray | None = None,
        decoder_replay: DecoderReplay = "paper",
    ) -> DeepSigV41Model:
        """Load from any source of named tensors.

        Raises:
            ConfigError: the configuration is inconsistent.
            LayoutError: tensors are missing, unexpected or misshapen.
        """
        parts = V41Parts.of(raw, options.block_size)
        loader = WeightLoader(
            reader,
            parts.config,
            parts.schedule,
            dtype=options.dtype,
            device=options.device,
            keep_fp4=keeps_fp4(parts.config, parts.schedule, options),
            pack=partial(pack_experts, dtype=options.dtype) if packs_experts(parts.config, options) else None,
        )
        return cls(parts, loader.load(), options, token_map, decoder_replay)

    @property
    def decoder_replay(self) -> DecoderReplay:
        """The decoder-side replay in force; may be changed while no step runs."""
        return self.backbone.decoder_replay

    @decoder_replay.setter
    def decoder_replay(self, value: DecoderReplay) -> None:
        if value not in DECODER_REPLAYS:
            raise ValueError(f"decoder_replay is {value!r}, must be one of {', '.join(DECODER_REPLAYS)}")
        self.backbone.decoder_replay = value

    def follow_strategy(self, strategy: str, *, decoder_replay: bool = True) -> None:
        """Fit the decoder side to the cache's window strategy (`CacheConfig.strategy`).

        Decoder replay leaves the decoder layers' windows incomplete, which only `bounded` allows: `full` and `periodic` keep
        windows for later requests, and `exact` promises the numbers of a full prefill.
        """
        if strategy != "bounded" or not decoder_replay:
            self.decoder_replay = "off"

    @property
    def counters(self) -> Counters:
        """Work done since the start."""
        return self.backbone.counters

    def allocate_cache(self, num_blocks: Mapping[str, int]) -> V41Cache:
        """Allocate the pools, `num_blocks[group.name]` blocks each."""
        return allocate(self.spec, num_blocks, self.options.device)

    @property
    def page_layout(self) -> str:
        """See `deepinfer_offline.engine.native.pages.PagedModel`."""
        return f"deepsig-v41/{LAYOUT_VERSION}/decoder-replay-{self.decoder_replay}"

    def page_blocks(self, cache: V41Cache) -> dict[str, tuple[Tensor, ...]]:
        """See `deepinfer_offline.engine.native.pages.PagedModel`."""
        return block_views(self.spec, cache)

    def capture_limit(self, rows: int, longest: int) -> int | None:
        """See `deepinfer_offline.models.base.Capturable`. Scores are as wide as the limit, so there are several, and not for
        more rows than there is room to score for (`captured_positions`).

        A step that writes the draft's context is captured too, as long as it verifies nothing.
        """
        if not getattr(self.backbone, "captures", False):
            return None
        limit = min(_capture_limit(longest), self.options.max_model_len)
        return limit if rows * limit <= captured_positions(self.options, rows) else None

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, cache: V41Cache) -> Tensor:
        """See `Model.forward`. Prompt rows pass the decoder layers only as far as the window needs (`decoder_replay`)."""
        result = self.backbone.forward(batch, cache)
        if self.draft is not None and self.drafting:
            self.draft.write_context(result, cache)
        return result.hidden

    @property
    def draft_width(self) -> int:
        """See `deepinfer_offline.models.base.DraftsBlocks`: the block of the `mtp` stages, 0 for a checkpoint without."""
        return 0 if self.draft is None else self.config.dspark_block_size

    def start_drafting(self) -> None:
        """See `deepinfer_offline.models.base.DraftsBlocks`."""
        self.drafting = True

    @torch.no_grad()
    def draft_blocks(
        self,
        anchors: Tensor,
        positions: Tensor,
        tables: Tensor,
        cache: V41Cache,
        choose: DraftChooser,
        longest: int,
    ) -> DraftedBlocks:
        """See `deepinfer_offline.models.base.DraftsBlocks`. Positions before a replay's start are never in reach: it begins a
        window before the first anchor at the latest.
        """
        assert self.draft is not None, "the checkpoint has no draft"
        floors = self.draft.held_from(positions)
        block = self.draft.propose(anchors, positions, tables, floors, cache, choose)
        return DraftedBlocks(block.tokens, block.confidence)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, d] to logits, float32 [n, vocab]; computed in float32.

        Where the head is exact in the model's dtype, CUDA multiplies it so and sums in float32: the same at half the bytes.
        """
        if self._head is not None:
            return torch.mm(hidden, self._head.t(), out_dtype=torch.float32)
        return functional.linear(hidden.float(), self.weights.head)


def _exact_head(weights: ModelWeights, options: ModelOptions) -> Tensor | None:
    """The head in the model's dtype where that loses nothing and the device can sum its products in float32."""
    if torch.device(options.device).type != "cuda" or options.dtype == torch.float32:
        return None
    head = weights.head.to(options.dtype)
    return head if torch.equal(head.float(), weights.head) else None


def _capture_limit(longest: int) -> int:
    """1024, 1536, 2048, 3072, 4096, ...: at most a third of the width is more than the step needs."""
    power = max(1024, 1 << (longest - 1).bit_length())
    return power * 3 // 4 if power > 1024 and longest <= power * 3 // 4 else power


def facts_of(parts: V41Parts, options: ModelOptions) -> ModelFacts:
    config = parts.config
    graphs, branch = graph_bytes(config, options)
    return ModelFacts(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        weight_bytes=dense_weight_bytes(config, parts.schedule, options),
        workspace_bytes=workspace_bytes(config, options),
        cache_groups=parts.spec.groups(),
        checkpoint_dtype=config.dtype,
        image_token_id=config.image_token_id,
        graph_bytes=graphs,
        graph_branch_bytes=branch,
    )
