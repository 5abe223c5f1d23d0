"""The DSpark draft: a block of tokens proposed at once from the target's hidden features. `v41-model` section 2.9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.attention import attention_output, project_latents
from deepinfer_offline.models.deepsig_v41.block import Residual, feed_forward, site
from deepinfer_offline.models.deepsig_v41.cache import WINDOW, V41Cache
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.device_rows import DeviceRows
from deepinfer_offline.models.deepsig_v41.stage import Frequencies, one_hot_pre
from deepinfer_offline.models.deepsig_v41.weights import LayerWeights, ModelWeights
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.cuda.support import kernels

if TYPE_CHECKING:
    from deepinfer_offline.models.deepsig_v41.backbone import StepResult

Sampler = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class DraftBlock:
    """A drafted block of B tokens for each of R sequences.

    Attributes:
        tokens: int64 [R, B]; tokens[:, k] is proposed for the position k + 1 after the anchor.
        logits: float32 [R, B, vocab], the distribution that each token was taken from.
        confidence: float32 [R, B], raw; its sigmoid is the chance that the token is accepted if those before it are.
        hidden: [R, B, d], collapsed draft state before the final norm.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor
    hidden: Tensor


def record_ops(pool: Tensor) -> Any:
    """What reads records of a pool. The portable op asks on the host whether slots are absent: on CUDA a wait."""
    return kernels() if pool.is_cuda and kernels() is not None else ops


def greedy(logits: Tensor, _position: int) -> Tensor:
    """The likeliest token, ties to the lowest id: float [R, vocab] to int64 [R]."""
    return logits.argmax(dim=-1)


@dataclass(frozen=True)
class Draft:
    """Runs the draft stages; their context KV lies in the window pools behind those of the target's layers."""

    config: V41Config
    weights: ModelWeights
    frequencies: Frequencies
    block_size: int

    def write_context(self, result: StepResult, cache: V41Cache) -> None:
        """Store each stage's context KV for the rows that reached the target's last layer. Call after every target step."""
        draft = self.weights.draft
        assert draft is not None, "the checkpoint has no draft"
        assert result.features is not None, "the step made no draft features"
        main = functional.linear(result.features, draft.main_proj)
        main = ops.rms_norm(main, draft.main_norm, self.config.rms_norm_eps)
        rows = result.stage
        for number, stage in enumerate(draft.stages):
            pool, weights = cache.window[self.config.num_hidden_layers + number], stage.attention
            if isinstance(rows, DeviceRows):
                rows.package.norm_rope_insert(
                    pool,
                    rows.window_slots,
                    functional.linear(main, weights.wqkv_a[self.config.q_lora_rank :]),
                    "fp8",
                    norm_weight=weights.kv_norm,
                    eps=self.config.rms_norm_eps,
                    table=rows.rotary(0),
                )
            else:
                _, kv = project_latents(main, weights, self.config, rows.rotary(0))
                ops.kv_insert(pool, rows.window_slots, kv, "fp8")

    def held_from(self, positions: Tensor) -> Tensor:
        """int64 [R], lowest context position that still has its block when the next row computes `positions`.

        That row itself reads one position less than a draft's context has. The cache manager lets go of whole blocks that it does
        not read, so once a block the draft goes without the farthest of its W positions.
        """
        return (positions - self.config.sliding_window + 1).clamp_min(0) // self.block_size * self.block_size

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        window_table: Tensor,
        floors: Tensor,
        cache: V41Cache,
        sample: Sampler = greedy,
    ) -> DraftBlock:
        """Draft one block for each sequence.

        Args:
            anchors: int64 [R], the last sampled tokens; the target has not run on them.
            positions: int64 [R], their positions a. The context is [max(a - W, floor), a - 1].
            window_table: int64 [R, columns], block table of the window group.
            floors: int64 [R], lowest context position that may be read (0 without replay).
            cache: the pools; only read.
            sample: takes logits [R, vocab] and the position in the block, returns int64 [R].
        """
        normed_input, hidden = self._states(anchors, positions, window_table, floors, cache)
        draft = self.weights.draft
        assert draft is not None, "the checkpoint has no draft"
        base = functional.linear(normed_input.float(), self.weights.head)
        previous, tokens, logits, confidence = anchors, [], [], []
        for k in range(self.config.dspark_block_size):
            step = ops.markov_step(base[:, k], previous, draft.markov_embed, draft.markov_head)
            confidence.append(ops.confidence(hidden[:, k], step.embedding, draft.confidence))
            previous = sample(step.logits, k)
            tokens.append(previous)
            logits.append(step.logits)
        return DraftBlock(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1), hidden)

    def _states(
        self, anchors: Tensor, positions: Tensor, window_table: Tensor, floors: Tensor, cache: V41Cache
    ) -> tuple[Tensor, Tensor]:
        """Normalised and raw collapsed states, [R, B, d] each."""
        c, draft = self.config, self.weights.draft
        assert draft is not None, "the checkpoint has no draft"
        rows, block = len(anchors), c.dspark_block_size
        ids = torch.full((rows, block), c.dspark_noise_token_id, dtype=torch.int64, device=anchors.device)
        ids[:, 0] = anchors
        embedded = functional.embedding(ids.flatten(), self.weights.embed)
        streams = embedded.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        residual = Residual(streams, one_hot_pre(rows * block, c.hc_mult, streams.device))
        query_positions = (positions.unsqueeze(1) + torch.arange(block, device=anchors.device)).flatten()
        rotary = self.frequencies.table(query_positions, 0)
        slots = self._context_slots(positions, window_table, floors)
        for number, stage in enumerate(draft.stages):
            pool = cache.window[c.num_hidden_layers + number]
            residual = self._stage(residual, stage, rotary, pool, slots, rows)
        hidden = residual.collapse()
        normed = ops.rms_norm(hidden, draft.norm, c.rms_norm_eps)
        return normed.unflatten(0, (rows, block)), hidden.unflatten(0, (rows, block))

    def _context_slots(self, positions: Tensor, window_table: Tensor, floors: Tensor) -> Tensor:
        """int64 [R, W], -1 where there is no context."""
        context = positions.unsqueeze(1) + torch.arange(-self.config.sliding_window, 0, device=positions.device)
        present = context >= floors.clamp_min(0).unsqueeze(1)
        safe = torch.where(present, context, (positions - 1).clamp_min(0).unsqueeze(1))
        block = window_table.gather(1, safe // self.block_size)
        return (block * self.block_size + safe % self.block_size).masked_fill(~present, -1)

    def _stage(
        self, residual: Residual, stage: LayerWeights, rotary: ops.RotaryTable, pool: Tensor, slots: Tensor, rows: int
    ) -> Residual:
        c = self.config

        def attention(x: Tensor) -> Tensor:
            latent, kv = project_latents(x, stage.attention, c, rotary)
            q = functional.linear(latent, stage.attention.wq_b).unflatten(-1, (c.num_attention_heads, c.head_dim))
            q = ops.apply_rope(q, rotary).unflatten(0, (rows, -1))
            own = ops.round_to_record(kv, "fp8").unflatten(0, (rows, -1)).float()
            context = record_ops(pool).kv_gather(pool, slots, "fp8", c.head_dim, torch.float32)
            keys = torch.cat((context, own, own.new_zeros(rows, 1, c.head_dim)), dim=1)
            present = torch.cat((slots >= 0, slots.new_ones((rows, own.shape[1] + 1), dtype=torch.bool)), dim=1)
            allowed = present.unsqueeze(1).expand(-1, q.shape[1], -1)
            attended = ops.attend(q, keys, allowed, stage.attention.sink, c.attention_scale)
            return attention_output(attended.flatten(0, 1), stage.attention, rotary)

        attended = site(residual, stage.hc_attn, stage.attn_norm, c, attention)
        return feed_forward(attended, stage, c, c.dspark_num_experts_per_tok)


def window_table_rows(tables: np.ndarray | Tensor, slots: Tensor) -> Tensor:
    """The window block tables of some slots as int64 [R, columns]."""
    table = torch.as_tensor(tables)
    return table[slots].to(torch.int64)


__all__ = ["WINDOW", "Draft", "DraftBlock", "Sampler", "greedy", "window_table_rows"]
