"""Held-out texts decoded again with drafts: the blocks that an engine would draft, and how much of each it would keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_specdec.dspark.model import Context, DSparkModel
from deepinfer_specdec.train.agreement import Rule
from deepinfer_specdec.train.blocks import Texts, block_mask
from deepinfer_specdec.train.data import Text, collate
from deepinfer_specdec.train.progress import Progress
from deepinfer_specdec.train.target import Target

_RARE = 1e-6  # probability below which a token surprises no more


@dataclass(frozen=True, slots=True)
class Blocks:
    """n blocks of K drafts.

    Attributes:
        logits: float32 [n, K], raw confidences.
        kept: int64 [n], drafts kept.
        text: int64 [n], place of the text in its list.
        surprise: float32 [n], by how many nats the token after the anchor is less likely than such tokens are on average: 0 in
            the mean if the texts were drawn from the target as the rule says.
    """

    logits: NDArray[np.float32]
    kept: NDArray[np.int64]
    text: NDArray[np.int64]
    surprise: NDArray[np.float32]


@torch.no_grad()
def walk(
    model: DSparkModel,
    target: Target,
    texts: Sequence[Text],
    rule: Rule,
    *,
    batch_size: int,
    max_length: int,
    device: str,
    seed: int = 0,
    progress: bool = False,
) -> Blocks:
    """Draft along the texts, from each anchor to the token after the last draft kept.

    Where a block begins depends on the block before: after a token that was not foreseen. Anchors spread evenly over a text
    would be easier than those that an engine meets. The first token of an answer comes without a draft, from the prompt.

    Drafts after the end of a text that the target ended are not kept; of one that was cut off no such block is drafted.
    """
    generator = torch.Generator().manual_seed(seed)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place].token_ids))  # alike in length: few idle rows
    found: list[Blocks] = []
    bar = Progress("evaluating", 0, len(order), progress)
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        batch = collate([texts[place] for place in places], target, max_length, device)
        found += _Walk(model.eval(), target, batch, rule, generator).blocks(np.array(places))
        bar.show(min(len(order), first + batch_size))
    bar.close()
    return _joined(found, model.config.block_size)


def _joined(parts: list[Blocks], width: int) -> Blocks:
    none = np.zeros(0, np.int64)
    every = [Blocks(np.zeros((0, width), np.float32), none, none, np.zeros(0, np.float32)), *parts]
    return Blocks(*(np.concatenate([getattr(part, field.name) for part in every]) for field in fields(Blocks)))


class _Walk:
    """A batch of texts, each with its own place."""

    def __init__(
        self, model: DSparkModel, target: Target, texts: Texts, rule: Rule, generator: torch.Generator
    ) -> None:
        self._model, self._parts, self._texts = model, target.parts, texts
        self._rule, self._generator = rule, generator
        rows, self._length = texts.token_ids.shape
        device = texts.token_ids.device
        places = torch.arange(self._length, device=device)
        self._context: Context = model.context(texts.features, places.expand(rows, -1))
        self._ends = (texts.trainable * (places + 1)).amax(1)
        # The last prompt token is marked too; the first anchor is the token after it.
        self._at = torch.where(texts.trainable, places, self._length).amin(1) + 1
        self._room = torch.where(texts.finished, 1, model.config.block_size)  # tokens that must follow an anchor

    def blocks(self, places: NDArray[np.int64]) -> list[Blocks]:
        """All blocks of the batch; `places` [B] are the texts' places."""
        found = []
        while True:
            live = torch.nonzero(self._at + self._room < self._ends)[:, 0]
            if not len(live):
                return found
            logits, kept, surprise = self._block(live)
            self._at[live] += kept + 1
            text = places[live.cpu().numpy()]
            found.append(Blocks(logits.cpu().numpy(), kept.cpu().numpy(), text, surprise.cpu().numpy()))

    def _block(self, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw confidences [R, K], drafts kept [R] and surprises [R] of one block in each of R rows."""
        model, texts, at = self._model, self._texts, self._at[live]
        width, ids = model.config.block_size, texts.token_ids[live]
        anchors = ids.gather(1, at[:, None])
        context = [(keys[live], values[live]) for keys, values in self._context]
        mask = block_mask(at[:, None], self._length, width, model.config.window)
        hidden = model.block(anchors, at[:, None], context, self._parts.embedding, mask)
        before = at[:, None] + torch.arange(width, device=at.device)
        said = ids.gather(1, (before + 1).clamp(max=self._length - 1))
        inside = before + 1 < self._ends[live, None]
        wanted = texts.last_hidden[live[:, None], before.clamp(max=self._length - 1)]
        target = self._rule.probabilities(model.base_logits(wanted, self._parts))

        def choose(logits: Tensor, k: int) -> Tensor:
            return self._rule.draw(target[:, k], self._rule.probabilities(logits), said[:, k], self._generator)

        base = model.base_logits(hidden, self._parts)
        tokens, confidence = model.sequential(base.unbind(1), hidden, anchors[:, 0], choose)
        kept = ((tokens == said) & inside).long().cumprod(1).sum(1)
        first = target[:, 0].clamp_min(_RARE).log()
        return confidence, kept, (target[:, 0] * first).sum(-1) - first.gather(1, said[:, :1])[:, 0]
