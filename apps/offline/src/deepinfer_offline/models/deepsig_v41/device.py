"""The target's layers on CUDA kernels: fused seams between sublayers, no decision that the host would have to wait for.

The same model as `backbone.Backbone`, which is the reference. Differences in the numbers: products and sums in another order,
and attention, norms and hyper-connections rounded to the model's dtype once instead of at every torch operation.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.aside import Aside
from deepinfer_offline.models.deepsig_v41.backbone import Counters, StepResult
from deepinfer_offline.models.deepsig_v41.cache import GLOBAL, V41Cache, entries_per_block
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.device_rows import Constants, DeviceRows, HostRows
from deepinfer_offline.models.deepsig_v41.device_weights import DeviceLayer, DeviceSite, wide_product
from deepinfer_offline.models.deepsig_v41.engram import EngramHash
from deepinfer_offline.models.deepsig_v41.memory import MAX_SCORES
from deepinfer_offline.models.deepsig_v41.replay import DecoderReplay, kept_rows, plan_trim
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan, Schedule
from deepinfer_offline.models.deepsig_v41.stage import Frequencies
from deepinfer_offline.models.deepsig_v41.weights import ModelWeights
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.cuda.support import kernels
from deepinfer_offline.ops.transfers import upload

if TYPE_CHECKING:
    from deepinfer_offline.models.base import ForwardBatch

_FUSED_ROWS = 128  # up to here one kernel rotates and projects; above, the batched product writes its result in place


@dataclass
class _Flow:
    """What changes from sublayer to sublayer.

    Attributes:
        streams: [T, S, d]; `output` is not yet in them.
        pre: float32 [T, S], carried to the next site.
        output: [T, d] of the last sublayer with its `mix`, to be mixed in at the next seam; None before the first.
        selected: int32 [T, k], slots of the entries of the last selection.
        candidates: bool [T, blocks of entries] in force, or None.
    """

    streams: Tensor
    pre: Tensor
    rows: DeviceRows
    output: Tensor | None = None
    mix: Any = None
    selected: Tensor | None = None
    candidates: Tensor | None = None
    engram_rows: dict[int, Tensor] = field(default_factory=dict)
    features: list[Tensor] = field(default_factory=list)


class DeviceBackbone:
    """Runs the target's layers on `deepinfer_kernels_cuda`. See `backbone.Backbone` for the meaning of the arguments.

    Raises:
        ValueError: `decoder_replay` is `vllm`, which only the reference has.
    """

    def __init__(
        self,
        config: V41Config,
        schedule: Schedule,
        weights: ModelWeights,
        frequencies: Frequencies,
        engram: EngramHash | None,
        decoder_replay: DecoderReplay,
        block_size: int,
    ) -> None:
        self.config, self.schedule, self.weights = config, schedule, weights
        self.frequencies, self.engram, self.block_size = frequencies, engram, block_size
        self.decoder_replay = decoder_replay
        self.counters = Counters()
        self.kernels = kernels()
        self.layers = [DeviceLayer.prepare(layer, config, weights.embed.dtype) for layer in weights.layers]
        device = weights.embed.device
        self.constants = Constants(config.hc_mult, device)
        self.aside = Aside(device)
        self.captures = all(isinstance(layer.experts, self.kernels.PackedExperts) for layer in self.layers)

    # --- a step ----------------------------------------------------------------------------------------------

    def forward(self, batch: ForwardBatch, cache: V41Cache) -> StepResult:
        """Compute every token of the batch and write its cache entries."""
        c = self.config
        rows = DeviceRows.of(
            batch, self.kernels, self.frequencies, self.constants, block=self.block_size, window=c.sliding_window
        )
        flow = _Flow(
            streams=functional.embedding(batch.token_ids.unsqueeze(1).expand(-1, c.hc_mult), self.weights.embed),
            pre=self.constants.pre(rows.count),
            rows=rows,
            engram_rows=self._engram_rows(batch, rows),
        )
        trim = None
        host = HostRows(batch.host)
        for plan, layer in zip(self.schedule.layers, self.layers, strict=True):
            self._before(flow, plan, layer)
            x = self._seam(flow, layer.attention)
            written = False
            if plan.index == self.schedule.cut and self.decoder_replay == "paper":
                trim = plan_trim(host, batch.host, c.sliding_window)  # type: ignore[arg-type]
                if trim is not None:
                    self._write_entries(x, flow.rows, plan, layer, cache)
                    written, x = True, self._narrow(flow, trim, x)
            flow.output = self._attention(flow, x, plan, layer, cache, written=written)
            flow.output = self._experts(self._seam(flow, layer.ffn), layer)
            self.counters.layer_tokens += flow.rows.count
        return self._finish(flow, batch, trim)

    def _seam(self, flow: _Flow, site: DeviceSite) -> Tensor:
        """Mix the last output in, and return the next sublayer's normalised input [T, d]."""
        c, mix = self.config, flow.mix
        step = self.kernels.mhc_step(
            flow.streams,
            site.fn,
            site.base,
            site.scale,
            pre=flow.pre,
            norm_weight=site.norm,
            norm_eps=c.rms_norm_eps,
            iterations=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
            output=flow.output,
            post=None if flow.output is None else mix.post,
            comb=None if flow.output is None else mix.comb,
        )
        flow.streams, flow.mix, flow.pre, flow.output = step.streams, step.mix, step.mix.pre, None
        return step.x

    def _settle(self, flow: _Flow) -> None:
        """Mix the last output into the streams without a new site."""
        if flow.output is not None:
            flow.streams = self.kernels.mhc_post(flow.output, flow.streams, flow.mix.post, flow.mix.comb)
            flow.output = None

    def _before(self, flow: _Flow, plan: LayerPlan, layer: DeviceLayer) -> None:
        """Engram, and the draft's features: both read the streams."""
        if plan.engram >= 0:
            self._settle(flow)
            engram = layer.source.engram
            assert engram is not None, "the layer has no Engram table"
            dtype = flow.streams.dtype
            memory = self.kernels.engram_gather(engram.table, engram.table_scale, flow.engram_rows[plan.engram], dtype)
            flow.streams = self.kernels.engram_update(
                flow.streams, memory, engram.wkv, engram.q_weight, engram.k_weight, eps=self.config.rms_norm_eps
            )
        if self.weights.draft is not None and plan.index in self.config.dspark_target_layer_ids:
            self._settle(flow)
            flow.features.append(flow.streams.float().mean(1).to(flow.streams.dtype))

    def _engram_rows(self, batch: ForwardBatch, rows: DeviceRows) -> dict[int, Tensor]:
        if self.engram is None:
            return {}
        history = self.engram.buffered_history(batch.tokens, batch.slots[rows.owners], rows.positions)
        tables = {plan.engram for plan in self.schedule.layers if plan.engram >= 0}
        return {table: self.engram.rows(table, history) for table in tables}

    def _narrow(self, flow: _Flow, trim: Any, x: Tensor) -> Tensor:
        """Go on with the rows that decoder replay keeps."""
        flow.rows, index = flow.rows.keep(trim)
        flow.streams, flow.pre = flow.streams[index], flow.pre[index]
        flow.mix = type(flow.mix)(*(part[index] for part in flow.mix))
        flow.engram_rows = {table: rows[index] for table, rows in flow.engram_rows.items()}
        flow.features = [feature[index] for feature in flow.features]
        flow.selected = None if flow.selected is None else flow.selected[index]
        flow.candidates = None if flow.candidates is None else flow.candidates[index]
        return x[index]

    # --- attention -------------------------------------------------------------------------------------------

    def _attention(
        self, flow: _Flow, x: Tensor, plan: LayerPlan, layer: DeviceLayer, cache: V41Cache, *, written: bool
    ) -> Tensor:
        c, k, rows, weights = self.config, self.kernels, flow.rows, layer.source.attention
        rotary = rows.rotary(plan.ratio)
        both = functional.linear(x, weights.wqkv_a)
        window_pool = cache.window[plan.index]
        latent = k.latent_insert(
            both,
            weights.q_norm,
            window_pool,
            rows.window_slots,
            "fp8",
            norm_weight=weights.kv_norm,
            eps=c.rms_norm_eps,
            table=rotary,
        )
        writes = plan.mode == "full" and not written
        selection = nullcontext() if not (writes or plan.selects) else self.aside.fork(rows.count)
        with selection:
            if writes:
                self._write_entries(x, rows, plan, layer, cache)
            if plan.selects:
                self._select(flow, x, latent, plan, layer, cache)
        q = functional.linear(latent, weights.wq_b).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = k.rope(q, rotary, inplace=True)
        self.aside.join()
        extra: dict[str, Tensor] = {}
        if plan.ratio:
            assert flow.selected is not None, f"layer {plan.index} has no selection to reuse"
            extra = {"compressed_pool": cache.compressed[plan.source], "compressed_slots": flow.selected}
        attended = k.sparse_mla_decode(q, window_pool, rows.window_keys, weights.sink, scale=c.attention_scale, **extra)
        return self._output(attended, layer, rotary)

    def _output(self, attended: Tensor, layer: DeviceLayer, rotary: Any) -> Tensor:
        """Undo the rotation and project: [T, heads, head_dim] to [T, d]."""
        weights = layer.source.attention
        if attended.shape[0] <= _FUSED_ROWS:
            return functional.linear(
                self.kernels.grouped_output(attended, weights.wo_a, rotary, inplace=True), weights.wo_b
            )
        straight = self.kernels.rope(attended, rotary, inverse=True, inplace=True)
        groups, width, rank = layer.wo_a.shape
        grouped = straight.view(-1, groups, width).transpose(0, 1)
        low = torch.empty(straight.shape[0], groups, rank, dtype=straight.dtype, device=straight.device)
        torch.bmm(grouped, layer.wo_a, out=low.transpose(0, 1))
        return functional.linear(low.flatten(1), weights.wo_b)

    def _write_entries(self, x: Tensor, rows: DeviceRows, plan: LayerPlan, layer: DeviceLayer, cache: V41Cache) -> None:
        """Compressed KV and index keys of the entries that the rows complete."""
        c, k, weights = self.config, self.kernels, layer.source.compressor
        assert weights is not None, f"layer {plan.index} is a KV source without a compressor"
        entries, table = rows.entries(plan.ratio), rows.entry_rotary(plan.ratio)
        if layer.compressor is None:
            latent = functional.linear(x, weights.wkv)
        else:
            latent = k.pool_groups(
                wide_product(x, layer.compressor, 2 * c.head_dim),
                rows.positions,
                rows.owners,
                rows.firsts,
                rows.ends,
                entries.slots,
                cache.rings[plan.index],
                rows.ring_blocks(),
                ratio=plan.ratio,
            ).to(x.dtype)
        latent = k.rms_norm(latent, weights.norm, c.rms_norm_eps)
        k.norm_rope_insert(cache.compressed[plan.index], entries.slots, latent, "nvfp4", table=table)
        k.norm_rope_insert(
            cache.index_keys[plan.index],
            entries.slots,
            functional.linear(latent, weights.wk),
            "mxfp4",
            norm_weight=weights.k_norm,
            eps=c.rms_norm_eps,
            table=table,
        )

    # --- selection -------------------------------------------------------------------------------------------

    def _select(
        self, flow: _Flow, x: Tensor, latent: Tensor, plan: LayerPlan, layer: DeviceLayer, cache: V41Cache
    ) -> None:
        """Choose each row's entries: slots int32 [T, k] in the source's pools, -1 where it sees fewer."""
        c, rows = self.config, flow.rows
        indexer = layer.source.indexer
        assert indexer is not None, f"layer {plan.index} selects without an indexer"
        columns, visible = rows.most_entries(plan.ratio), rows.entries(plan.ratio).visible
        queries = self._index_queries(functional.linear(latent, indexer.wq_b), rows, plan.ratio)
        assert layer.index_weights is not None
        weights = functional.linear(x, layer.index_weights)
        pool = cache.index_keys[plan.source]
        pool = pool.view(-1, entries_per_block(self.block_size, plan.ratio), pool.shape[1])
        publishes = plan.publishes_candidates and -(-columns // c.candidate_block_size) > c.candidate_topk_blocks
        candidates = flow.candidates if plan.uses_candidates else None
        size = max(1, MAX_SCORES // columns)
        chosen, published = [], []
        for start in range(0, rows.count, size):
            part = slice(start, start + size)
            scores = self.kernels.indexer_logits(
                queries[part],
                weights[part],
                pool,
                rows.tables[GLOBAL],
                rows.owners[part],
                visible[part],
                max_entries=columns,
            )
            if publishes:
                mask = self.kernels.candidate_mask(
                    scores, visible[part], blocks=c.candidate_topk_blocks, block_size=c.candidate_block_size
                )
                published.append(_kept_blocks(mask, c.candidate_block_size))
                del mask
            elif candidates is not None:
                _leave_blocks(scores, candidates[part], c.candidate_block_size)
            chosen.append(self.kernels.topk_lowest_index(scores, c.index_topk, visible[part]))
            del scores  # before there are others
        if publishes:
            flow.candidates = published[0] if len(published) == 1 else torch.cat(published)
        elif plan.publishes_candidates:
            flow.candidates = None
        found = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        flow.selected = self.kernels.selected_slots(
            found, rows.owners, rows.tables[GLOBAL], ratio=plan.ratio, block=self.block_size
        )

    def _index_queries(self, flat: Tensor, rows: DeviceRows, ratio: int) -> Tensor:
        """[T, heads, n], rotated and rounded to the record format."""
        c = self.config
        return self.kernels.rope_round(
            flat.unflatten(-1, (c.index_n_heads, c.index_head_dim)), rows.rotary(ratio), "mxfp4"
        )

    # --- experts and the end ---------------------------------------------------------------------------------

    def _experts(self, x: Tensor, layer: DeviceLayer) -> Tensor:
        c, k, moe = self.config, self.kernels, layer.source.moe
        with self.aside.fork(x.shape[0]):
            inner = k.clamped_swiglu(functional.linear(x, moe.shared_gate_up), c.swiglu_limit)
            shared = functional.linear(inner, moe.shared_down)
        ids, weights = k.router(
            x if layer.gate.dtype == x.dtype else x.to(layer.gate.dtype),
            layer.gate,
            moe.bias,
            k=c.num_experts_per_tok,
            normalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        if isinstance(layer.experts, k.PackedExperts):

            def finished() -> Tensor:
                self.aside.join()
                return shared

            return k.moe_experts(x, ids, weights, layer.experts, limit=c.swiglu_limit, shared=finished)
        routed = ops.moe_experts(x, ids, weights, layer.experts, limit=c.swiglu_limit)
        self.aside.join()
        return routed + shared

    def _finish(self, flow: _Flow, batch: ForwardBatch, trim: Any) -> StepResult:
        counters, total = self.counters, len(batch.token_ids)
        counters.steps += 1
        counters.tokens += total
        counters.trimmed_tokens += total - flow.rows.count
        self._settle(flow)
        streams, pre = flow.streams, flow.pre
        wanted = kept_rows(trim, batch.host.logit_rows, total)
        if len(wanted) != len(pre):
            if trim is None:
                index = batch.logit_rows
            else:
                (index,) = upload([wanted], pre.device)
            streams, pre = streams[index], pre[index]
        collapsed = self.kernels.mhc_collapse(streams, pre)
        hidden = self.kernels.rms_norm(collapsed, self.weights.norm, self.config.rms_norm_eps)
        features = torch.cat(flow.features, dim=-1) if flow.features else None
        return StepResult(hidden, features, flow.rows)  # type: ignore[arg-type]


def _kept_blocks(mask: Tensor, size: int) -> Tensor:
    """bool [t, entries] to bool [t, blocks of `size` entries]: whether any is kept. Those that are not seen have no say later."""
    if mask.shape[1] % size:
        mask = functional.pad(mask, (0, -mask.shape[1] % size))
    return mask.unflatten(1, (-1, size)).any(-1)


def _leave_blocks(scores: Tensor, kept: Tensor, size: int) -> None:
    """Set scores [t, entries] outside of the kept blocks, bool [t, blocks], to -inf, in place.

    A last block that is not whole is the newest one of every row that sees it, and so always kept.
    """
    whole = scores.shape[1] // size
    scores[:, : whole * size].unflatten(1, (whole, size)).masked_fill_(~kept[:, :whole, None], -torch.inf)
