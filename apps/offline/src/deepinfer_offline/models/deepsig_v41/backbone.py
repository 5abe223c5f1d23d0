"""The target's layers over one step: encoder rows, the cut, decoder rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.attention import CompressedKeys, attend_rows, project_latents
from deepinfer_offline.models.deepsig_v41.block import Residual, add_engram, feed_forward, site
from deepinfer_offline.models.deepsig_v41.cache import V41Cache, ring_rows
from deepinfer_offline.models.deepsig_v41.compressor import write_entries
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.engram import EngramHash
from deepinfer_offline.models.deepsig_v41.replay import DecoderReplay, Trim, kept_rows, plan_trim
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan, Schedule
from deepinfer_offline.models.deepsig_v41.selection import select_entries
from deepinfer_offline.models.deepsig_v41.stage import Frequencies, Stage, one_hot_pre
from deepinfer_offline.models.deepsig_v41.weights import LayerWeights, ModelWeights
from deepinfer_offline.ops import deepsig as ops

if TYPE_CHECKING:
    from deepinfer_offline.models.base import ForwardBatch


@dataclass
class Counters:
    """Work done since the start. `layer_tokens` counts a token once for every layer that computed it."""

    steps: int = 0
    tokens: int = 0
    layer_tokens: int = 0
    trimmed_tokens: int = 0  # rows that skipped the decoder layers


@dataclass(frozen=True)
class StepResult:
    """What a step leaves.

    Attributes:
        hidden: [n, d], normalised hidden states of the batch's logit rows.
        features: [k, targets * d], mean streams entering the draft's target layers, of the rows of `stage`; None without draft.
        stage: the rows that reached the last layer.
    """

    hidden: Tensor
    features: Tensor | None
    stage: Stage


@dataclass
class _Flow:
    """What changes from layer to layer within one step."""

    residual: Residual
    stage: Stage
    engram_rows: dict[int, Tensor]
    features: list[Tensor]
    trim: Trim | None = None

    def narrow(self, trim: Trim, stage: Stage) -> None:
        """Go on with the kept rows only."""
        index = stage.rows.tensor(trim.kept)
        self.residual = self.residual.take(index)
        self.engram_rows = {table: rows[index] for table, rows in self.engram_rows.items()}
        self.features = [feature[index] for feature in self.features]
        self.stage, self.trim = stage, trim


@dataclass
class Backbone:
    """Runs the target's layers.

    Attributes:
        decoder_replay: `paper` = window floors rise from the cut layer on; `vllm` = from the layer after it, and the cut layer
            stores the window KV of every row; `off` = every row passes every layer.
        block_size: tokens of a cache block.
    """

    config: V41Config
    schedule: Schedule
    weights: ModelWeights
    frequencies: Frequencies
    engram: EngramHash | None
    decoder_replay: DecoderReplay
    block_size: int
    counters: Counters = field(default_factory=Counters)

    def forward(self, batch: ForwardBatch, cache: V41Cache) -> StepResult:
        """Compute every token of the batch and write its cache entries."""
        step = StepRows.of(batch, self.block_size)
        flow = _Flow(
            residual=self._embed(batch.token_ids),
            stage=Stage.of(step, self.config, self.frequencies),
            engram_rows=self._engram_rows(batch, step),
            features=[],
        )
        for plan, layer in zip(self.schedule.layers, self.weights.layers, strict=True):
            if plan.engram >= 0:
                flow.residual = add_engram(flow.residual, layer, flow.engram_rows[plan.engram], self.config)
            if self.weights.draft is not None and plan.index in self.config.dspark_target_layer_ids:
                flow.features.append(flow.residual.streams.float().mean(1).to(flow.residual.streams.dtype))
            if plan.index == self.schedule.cut:
                self._cut(flow, plan, layer, step, batch, cache)
            self._layer(flow, plan, layer, cache)
            if flow.trim is not None and plan.index == self.schedule.cut and self.decoder_replay == "vllm":
                self._raise_floors(flow, step)
        return self._finish(flow, step, batch)

    def _embed(self, token_ids: Tensor) -> Residual:
        embedded = functional.embedding(token_ids, self.weights.embed)
        streams = embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        return Residual(streams, one_hot_pre(len(token_ids), self.config.hc_mult, streams.device))

    def _engram_rows(self, batch: ForwardBatch, step: StepRows) -> dict[int, Tensor]:
        if self.engram is None:
            return {}
        history = self.engram.token_history(batch, step)
        tables = {plan.engram for plan in self.schedule.layers if plan.engram >= 0}
        return {table: self.engram.rows(table, history) for table in tables}

    def _cut(
        self, flow: _Flow, plan: LayerPlan, layer: LayerWeights, step: StepRows, batch: ForwardBatch, cache: V41Cache
    ) -> None:
        """Write the last source's global entries for every row, then drop the rows that no later layer needs."""
        if self.decoder_replay == "off":
            return
        trim = plan_trim(step, batch.host, self.config.sliding_window)
        if trim is None:
            return
        x = ops.rms_norm(flow.residual.collapse(), layer.attn_norm, self.config.rms_norm_eps)
        self._write_entries(x, plan, layer, flow.stage, cache)
        floors = trim.floors
        if self.decoder_replay == "vllm":
            _, kv = project_latents(x, layer.attention, self.config, flow.stage.rotary(plan.ratio))
            ops.kv_insert(cache.window[plan.index], flow.stage.window_slots, kv, "fp8")
            floors = step.floors
        flow.narrow(trim, Stage.of(step.keep(trim.kept, floors), self.config, self.frequencies))

    def _raise_floors(self, flow: _Flow, step: StepRows) -> None:
        """`vllm` variant, after the cut layer: the same rows, now with the floor of the kept window."""
        assert flow.trim is not None
        stage = Stage.of(step.keep(flow.trim.kept, flow.trim.floors), self.config, self.frequencies)
        stage.selections = flow.stage.selections
        flow.stage = stage

    def _layer(self, flow: _Flow, plan: LayerPlan, layer: LayerWeights, cache: V41Cache) -> None:
        stage = flow.stage
        written = flow.trim is not None and plan.index == self.schedule.cut

        def attention(x: Tensor) -> Tensor:
            rotary = stage.rotary(plan.ratio)
            latent, kv = project_latents(x, layer.attention, self.config, rotary)
            ops.kv_insert(cache.window[plan.index], stage.window_slots, kv, "fp8")
            if plan.mode == "full" and not written:
                self._write_entries(x, plan, layer, stage, cache)
            if plan.selects:
                self._select(x, latent, plan, layer, stage, cache)
            compressed = None
            if plan.ratio:
                assert stage.selections is not None, f"layer {plan.index} has no selection to reuse"
                compressed = CompressedKeys(cache.compressed[plan.source], plan.source, plan.ratio, stage.selections)
            return attend_rows(
                latent,
                layer.attention,
                self.config,
                stage.rows,
                stage.tiles,
                rotary,
                cache.window[plan.index],
                compressed,
            )

        attended = site(flow.residual, layer.hc_attn, layer.attn_norm, self.config, attention)
        flow.residual = feed_forward(attended, layer, self.config, self.config.num_experts_per_tok)
        self.counters.layer_tokens += stage.rows.count

    def _select(
        self, x: Tensor, latent: Tensor, plan: LayerPlan, layer: LayerWeights, stage: Stage, cache: V41Cache
    ) -> None:
        assert layer.indexer is not None, f"layer {plan.index} selects without an indexer"
        stage.selections = select_entries(
            plan,
            self.config,
            layer.indexer,
            stage.rows,
            stage.tiles,
            x,
            latent,
            stage.rotary(plan.ratio),
            cache,
            stage.selections,
        )

    def _write_entries(self, x: Tensor, plan: LayerPlan, layer: LayerWeights, stage: Stage, cache: V41Cache) -> None:
        assert layer.compressor is not None, f"layer {plan.index} is a KV source without a compressor"
        ring = ring_rows(plan.ratio) if plan.ratio > 1 else 0
        writes = stage.writes(plan.ratio, ring)
        frequencies = self.frequencies.compressed
        write_entries(x, stage.rows, writes, plan, layer.compressor, self.config, frequencies, cache)

    def _finish(self, flow: _Flow, step: StepRows, batch: ForwardBatch) -> StepResult:
        counters = self.counters
        counters.steps += 1
        counters.tokens += step.count
        counters.trimmed_tokens += step.count - flow.stage.rows.count
        rows = kept_rows(flow.trim, batch.host.logit_rows.astype(np.int64), step.count)
        collapsed = flow.residual.take(step.tensor(rows)).collapse()
        hidden = ops.rms_norm(collapsed, self.weights.norm, self.config.rms_norm_eps)
        return StepResult(hidden, torch.cat(flow.features, dim=-1) if flow.features else None, flow.stage)
