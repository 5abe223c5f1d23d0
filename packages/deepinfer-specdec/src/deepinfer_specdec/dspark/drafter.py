"""The DSpark drafter: a cache of injected context per sequence, one batched block forward, then token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_specdec.draft import PAD, Draft
from deepinfer_specdec.dspark.model import Context, DSparkModel, TargetParts
from deepinfer_specdec.errors import DraftShapeError
from deepinfer_specdec.scheduling.calibration import TemperatureScaling
from deepinfer_specdec.verification import randomness
from deepinfer_specdec.verification.batched import inverse_cdf, uniform

Distribution = Callable[[Sequence[int], Tensor], Tensor]
"""(sequences, logits [R, V]) -> probabilities [R, V]: the target's temperature, filters and masks, applied to the draft too."""


@dataclass(slots=True)
class _Followed:
    """A live sequence: its last token, its length, and the injected keys and values of the positions seen by the target."""

    seed: int
    last: int
    length: int
    keys: list[Tensor] = field(default_factory=list)  # per layer [kv heads, C, D]
    values: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class DSparkDrafter:
    """Implements `FeatureDrafter`.

    Greedy drafts are deterministic (one-hot); with `distribution` given, tokens are drawn from the draft's distribution with
    numbers keyed by (seed, position, anchor), and the distributions go along for verification.

    Args:
        model: the draft.
        target: embedding and LM head of the target.
        distribution: how logits become probabilities; None drafts greedily.
        calibration: temperatures of the confidence head (STS).
        seed: of sequences that `begin` names no seed for.
    """

    name = "dspark"

    def __init__(
        self,
        model: DSparkModel,
        target: TargetParts,
        distribution: Distribution | None = None,
        calibration: TemperatureScaling | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.max_draft = model.config.block_size
        self.calibration = calibration or TemperatureScaling.identity(self.max_draft)
        self.confidence_logits: NDArray[np.float32] = np.zeros((0, self.max_draft), np.float32)  # of the last block
        self._target = target
        self._distribution = distribution
        self._seed = seed
        self._followed: dict[int, _Followed] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.config.taps

    def begin(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32], seed: int | None = None) -> None:
        """See `Drafter.begin`. `seed` keys the sequence's draws; by default the drafter's seed and the sequence's name do."""
        mixed = self._seed * 0x9E3779B1 + sequence if seed is None else seed
        self._followed[sequence] = _Followed(mixed, int(token_ids[-1]), len(token_ids))

    def extend(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """See `Drafter.extend`."""
        if len(token_ids):
            followed = self._followed[sequence]
            followed.last = int(token_ids[-1])
            followed.length += len(token_ids)

    @torch.inference_mode()
    def observe(self, sequence: int, start: int, features: Tensor) -> None:
        """See `FeatureDrafter.observe`: positions from `start` on are replaced, so rejected drafts leave nothing behind."""
        followed = self._followed[sequence]
        count = features.shape[0]
        places = torch.arange(start, start + count, device=features.device)[None]
        context = self.model.context(features[None].to(self.model.fc.weight.dtype), places)
        keep = next((i for i, p in enumerate(followed.positions) if p >= start), len(followed.positions))
        window = self.model.config.window
        first = max(0, keep + count - window) if window else 0
        followed.positions = [*followed.positions[:keep], *range(start, start + count)][first:]
        for held, new in ((followed.keys, 0), (followed.values, 1)):
            for layer, pair in enumerate(context):
                old = held[layer][:, :keep] if layer < len(held) else pair[new][0, :, :0]
                joined = torch.cat([old, pair[new][0]], dim=1)[:, first:]
                held[layer : layer + 1] = [joined]

    @torch.inference_mode()
    def propose(self, sequences: Sequence[int], limits: NDArray[np.int32] | None = None, floor: float = 0.0) -> Draft:
        """See `Drafter.propose`. Only context before the anchor is attended. A block is drawn whole, whatever `floor`."""
        rows = [self._followed[sequence] for sequence in sequences]
        width = self.max_draft
        counts = np.full(len(rows), width, np.int32) if limits is None else np.clip(limits, 0, width).astype(np.int32)
        if not rows:
            return Draft.from_rows([], [], width)
        device = self._target.embedding.device
        anchors = torch.tensor([row.last for row in rows], device=device)
        places = torch.tensor([row.length - 1 for row in rows], device=device)
        context, visible = self._gather(rows, device)
        own = torch.ones(len(rows), width, dtype=torch.bool, device=device)
        mask = torch.cat([visible, own], 1)[:, None].expand(-1, width, -1)
        hidden = self.model.block(anchors[:, None], places[:, None], context, self._target.embedding, mask)
        tokens, confidence, distributions = self._sequential(sequences, rows, anchors, places, hidden)
        return self._pack(counts, tokens, confidence, distributions)

    def end(self, sequence: int) -> None:
        """See `Drafter.end`."""
        self._followed.pop(sequence, None)

    def _gather(self, rows: list[_Followed], device: torch.device) -> tuple[Context, Tensor]:
        """Contexts padded to one length, and bool [R, C] of what is real and lies before the anchor."""
        most = max(len(row.positions) for row in rows)
        visible = torch.zeros(len(rows), most, dtype=torch.bool)
        for index, row in enumerate(rows):
            here = np.asarray(row.positions) < row.length - 1
            visible[index, : len(here)] = torch.from_numpy(here)
        config, weight = self.model.config, self.model.fc.weight
        empty = weight.new_zeros(config.num_kv_heads, 0, config.head_dim)

        def padded(tensors: list[Tensor]) -> Tensor:
            return torch.stack([torch.nn.functional.pad(t, (0, 0, 0, most - t.shape[1])) for t in tensors])

        context = [
            (
                padded([row.keys[layer] if row.keys else empty for row in rows]),
                padded([row.values[layer] if row.values else empty for row in rows]),
            )
            for layer in range(config.num_layers)
        ]
        return context, visible.to(device)

    def _sequential(
        self, sequences: Sequence[int], rows: list[_Followed], anchors: Tensor, places: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [R, K], raw confidences [R, K] and distributions [R, K, V] or None."""
        base = self.model.base_logits(hidden, self._target)
        seeds = torch.tensor([_signed(row.seed) for row in rows], device=anchors.device)
        drawn_from: list[Tensor] = []

        def choose(logits: Tensor, k: int) -> Tensor:
            if self._distribution is None:
                return logits.argmax(-1)
            drawn_from.append(self._distribution(sequences, logits))
            return inverse_cdf(drawn_from[-1], uniform(seeds, places + 1 + k, randomness.DRAFT, places))

        tokens, confidence = self.model.sequential(base.unbind(1), hidden, anchors, choose)
        return tokens, confidence, torch.stack(drawn_from, 1) if drawn_from else None

    def _pack(
        self, counts: NDArray[np.int32], tokens: Tensor, confidence: Tensor, distributions: Tensor | None
    ) -> Draft:
        self.confidence_logits = confidence.cpu().numpy()
        inside = np.arange(self.max_draft) < counts[:, None]
        ids = np.where(inside, tokens.cpu().numpy(), PAD).astype(np.int32)
        sure = np.where(inside, self.calibration.confidences(self.confidence_logits), np.float32(0))
        if sure.shape != ids.shape:
            raise DraftShapeError(f"confidences {sure.shape}; allowed: {ids.shape}")
        return Draft(ids, counts, sure, None if distributions is None else distributions.cpu().numpy())


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
