"""Anchors and blocks: which places of a text the draft is asked to continue, and what it may see there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_specdec.dspark.model import DSparkModel, TargetParts


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of B texts with what the target computed for them.

    Attributes:
        token_ids: int64 [B, T].
        features: [B, T, m * hidden], concatenated taps.
        last_hidden: [B, T, hidden], what the LM head reads.
        trainable: bool [B, T], tokens that the target generated and the last one of the prompt, the first one's anchor.
        finished: bool [B], texts that the target ended itself; others were cut off.
    """

    token_ids: Tensor
    features: Tensor
    last_hidden: Tensor
    trainable: Tensor
    finished: Tensor


@dataclass(frozen=True, slots=True)
class BlockOutputs:
    """N blocks a text: logits [B * N, K, V] of draft and target, labels, raw confidences, and which columns count [B * N, K].

    `over` marks the column after a text's end: nothing is kept there, which is all that it teaches.
    """

    draft_logits: Tensor
    target_logits: Tensor
    labels: Tensor
    confidence: Tensor
    valid: Tensor
    over: Tensor


def sample_anchors(trainable: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Positions int64 [B, N] of anchors and bool [B, N] of real ones. An anchor and the token after it must be trainable."""
    usable = trainable[:, :-1] & trainable[:, 1:]
    score = torch.rand(usable.shape, generator=generator).to(usable.device).masked_fill(~usable, -1.0)
    best, anchors = score.topk(min(count, usable.shape[1]), dim=1)
    return anchors, best >= 0.0


def block_mask(anchors: Tensor, length: int, width: int, window: int = 0) -> Tensor:
    """bool [B, N * K, T + N * K]: a row sees the context before its anchor (the last `window` of it) and its own block."""
    per_row = anchors.repeat_interleave(width, dim=1)[..., None]
    places = torch.arange(length, device=anchors.device)
    context = places < per_row
    if window:
        context &= places >= per_row - window
    block = torch.arange(anchors.shape[1] * width, device=anchors.device) // width
    own = (block[:, None] == block).expand(anchors.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)


def run_blocks(model: DSparkModel, target: TargetParts, texts: Texts, anchors: Tensor, real: Tensor) -> BlockOutputs:
    """Draft all blocks of a batch with the text's own tokens as previous ones (teacher forcing)."""
    width, (rows, length) = model.config.block_size, texts.token_ids.shape
    places = torch.arange(length, device=anchors.device).expand(rows, -1)
    context = model.context(texts.features, places)
    mask = block_mask(anchors, length, width, model.config.window)
    hidden = model.block(texts.token_ids.gather(1, anchors), anchors, context, target.embedding, mask)
    hidden = hidden.view(rows * anchors.shape[1], width, -1)
    at = (anchors[..., None] + torch.arange(width, device=anchors.device)).flatten(1)  # predicts the token at + 1
    inside = at + 1 < length
    label_at = (at + 1).clamp(max=length - 1)
    flat = (rows * anchors.shape[1], width)
    previous = texts.token_ids.gather(1, at.clamp(max=length - 1)).view(flat)
    labels = texts.token_ids.gather(1, label_at).view(flat)
    good = (inside & texts.trainable.gather(1, label_at)).view(flat) & real.flatten()[:, None]
    valid = good.long().cumprod(1).bool()
    last = (texts.trainable * (places + 1)).amax(1) - 1
    over = (texts.finished[:, None] & (at == last[:, None])).view(flat)
    over[:, 1:] &= valid[:, :-1]
    over[:, 0] = False
    wanted = texts.last_hidden.gather(
        1, at.clamp(max=length - 1)[..., None].expand(-1, -1, texts.last_hidden.shape[-1])
    )
    markov, logits = model.markov_head, model.base_logits(hidden, target)
    return BlockOutputs(
        draft_logits=logits if markov is None else logits + markov.teacher_forced(previous, hidden),
        target_logits=model.base_logits(wanted, target).view(*flat, -1),
        labels=labels,
        confidence=model.confidence_logits(hidden, previous),
        valid=valid,
        over=over,
    )
