"""Held-out evaluation: accepted length and calibration, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.scheduling.calibration import TemperatureScaling, cumulative_errors, fit_sts
from deepinfer_specdec.train.blocks import run_blocks, sample_anchors
from deepinfer_specdec.train.data import Text, collate
from deepinfer_specdec.train.losses import acceptance
from deepinfer_specdec.train.target import Target


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Numbers by position (0 is the first draft) over held-out blocks.

    Attributes:
        acceptance: probability of acceptance given that the earlier ones were.
        survival: probability that the position and all before it are accepted.
        accepted_length: expected tokens per verification step, the bonus included.
        ece_before, ece_after: calibration error of the head's cumulative survival, raw and after STS.
        ece_chance: what `ece_after` would be if the scaled head were right: a few blocks in a bin differ from their mean.
        scaling: the temperatures; fitted on one half of the blocks, the errors are of the other half.
        blocks: how many.
    """

    acceptance: NDArray[np.float64]
    survival: NDArray[np.float64]
    accepted_length: float
    ece_before: NDArray[np.float64]
    ece_after: NDArray[np.float64]
    ece_chance: NDArray[np.float64]
    scaling: TemperatureScaling
    blocks: int

    def table(self) -> str:
        """For people."""
        lines = ["position  acceptance  survival  ECE before  ECE after STS  by chance  temperature"]
        for k in range(self.survival.size):
            lines.append(
                f"{k + 1:8}  {self.acceptance[k]:10.3f}  {self.survival[k]:8.3f}  {100 * self.ece_before[k]:9.2f}%"
                f"  {100 * self.ece_after[k]:12.2f}%  {100 * self.ece_chance[k]:8.2f}%  {self.scaling.temperatures[k]:11.2f}"
            )
        lines.append(f"accepted length {self.accepted_length:.3f} (bonus included) over {self.blocks} blocks")
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    model: DSparkModel,
    target: Target,
    texts: Sequence[Text],
    *,
    batch_size: int,
    anchors: int,
    max_length: int,
    device: str,
    seed: int = 0,
) -> Evaluation:
    """Evaluate at temperature 1 along held-out texts.

    The acceptance of a position is analytic, 1 - TV, on the text's own prefix; whether a block survives it is drawn once with a
    fixed seed, so that calibration is measured against outcomes.
    """
    model.eval()
    logits, accepted, whole = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(texts), batch_size):
        batch = collate(texts[first : first + batch_size], target, max_length, device)
        out = run_blocks(model, target.parts, batch, *sample_anchors(batch.trainable, anchors, generator))
        full = out.valid.all(dim=1)  # blocks cut by a text's end would count as rejected
        logits.append(out.confidence[full].cpu())
        accepted.append(acceptance(out.draft_logits[full], out.target_logits[full]).cpu())
        whole.append(full)
    return _summarise(torch.cat(logits).numpy(), torch.cat(accepted).double().numpy(), seed)


def _summarise(logits: NDArray[np.float32], accepted: NDArray[np.float64], seed: int) -> Evaluation:
    count, width = accepted.shape
    random = np.random.default_rng(seed)
    lengths = _lengths(random, accepted)
    fit, test = slice(0, None, 2), slice(1, None, 2)
    plain = TemperatureScaling.identity(width)
    scaling = fit_sts(logits[fit], lengths[fit]) if count >= 2 else plain
    survival = np.cumprod(accepted, axis=1)
    believed = _lengths(random, scaling.confidences(logits[test]))
    reached = np.concatenate([np.ones((count, 1)), survival[:, :-1]], axis=1)
    return Evaluation(
        acceptance=survival.sum(axis=0) / np.maximum(reached.sum(axis=0), 1e-12),
        survival=survival.mean(axis=0),
        accepted_length=1.0 + float(survival.mean(axis=0).sum()),
        ece_before=cumulative_errors(plain, logits[test], lengths[test]),
        ece_after=cumulative_errors(scaling, logits[test], lengths[test]),
        ece_chance=cumulative_errors(scaling, logits[test], believed),
        scaling=scaling,
        blocks=count,
    )


def _lengths(random: np.random.Generator, chances: NDArray[np.floating]) -> NDArray[np.int64]:
    """Accepted drafts int64 [n] of blocks whose columns hold with `chances` [n, K], drawn."""
    return np.cumprod(random.random(chances.shape) < chances, axis=1).sum(axis=1)
