"""Held-out evaluation: accepted length and calibration, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.calibration import (
    Fit,
    TemperatureScaling,
    chance_errors,
    expected_calibration_error,
    fit_scaling,
    fit_sts,
)
from deepinfer_specdec.train.agreement import Rule
from deepinfer_specdec.train.data import Text
from deepinfer_specdec.train.target import Target
from deepinfer_specdec.train.walk import Blocks, walk

BAR = 0.02  # calibration error of the cumulative survival to stay under
_SURPRISING = 0.15  # nats a token; at temperature 0 one token in a hundred, more than near-ties make


@dataclass(frozen=True, slots=True)
class Calibration:
    """A way to scale the head, measured on texts that it was not fitted on.

    Attributes:
        name: for people.
        scaling: fitted on all blocks.
        errors: ECE of the cumulative survival by position [K]. Each half of the texts is scaled by a fit on the other half.
        chance: what `errors` would be if the scaled head were right [K]: a few blocks in a bin differ from their mean.
        chance_most: what it would stay under 19 times in 20 [K].
    """

    name: str
    scaling: TemperatureScaling
    errors: NDArray[np.float64]
    chance: NDArray[np.float64]
    chance_most: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Numbers by position (0 is the first draft) over the blocks of held-out texts.

    Attributes:
        rule: the verification that decided what is kept.
        acceptance: share of the drafts kept whose predecessors were.
        survival: share of the blocks of which the position and all before it are kept.
        accepted_length: tokens per verification step, the bonus included.
        raw, sts, offset: calibration of the head as it is, with STS, and with an offset beside each temperature.
        blocks, texts: how many.
        surprise: mean of `Blocks.surprise` and its standard error, in nats.
    """

    rule: Rule
    acceptance: NDArray[np.float64]
    survival: NDArray[np.float64]
    accepted_length: float
    raw: Calibration
    sts: Calibration
    offset: Calibration
    blocks: int
    texts: int
    surprise: tuple[float, float]

    @property
    def best(self) -> Calibration:
        """STS, unless offsets err less on texts that they were not fitted on, by more than chance makes.

        Of rejection sampling always STS: vLLM's adapter takes temperatures alone.
        """
        if self.rule.method == "standard":
            return self.sts
        gained = float((self.sts.errors - self.offset.errors).max())
        lost = float((self.offset.errors - self.sts.errors).max())
        return self.offset if gained > max(lost, float(self.offset.chance.max()) / 2) else self.sts

    def table(self) -> str:
        """For people."""
        lines = [
            "          acceptance  survival  ECE before  ECE after STS  with offset    by chance (95%)  temperature"
        ]
        scaled = self.best
        for k in range(self.survival.size):
            errors = f"{_percent(self.raw, k)}  {_percent(self.sts, k):>12}  {_percent(self.offset, k):>12}"
            lines.append(
                f"draft {k + 1:2}  {self.acceptance[k]:10.3f}  {self.survival[k]:8.3f}  {errors:>38}"
                f"  {100 * scaled.chance[k]:9.2f}% ({100 * scaled.chance_most[k]:.2f}%)  {scaled.scaling.temperatures[k]:11.2f}"
            )
        rule = f"{self.rule.method} verification at temperature {self.rule.temperature:g}"
        lines.append(f"accepted length {self.accepted_length:.3f} (bonus included) over {self.blocks} blocks, {rule}")
        return "\n".join([*lines, self.verdict(), *self.doubts()])

    def verdict(self) -> str:
        """Whether the calibration is good enough, or too little was seen to tell. Chance only adds to an ECE."""
        found = self.best
        worst = int(found.errors.argmax())
        says = f"calibration error {100 * found.errors[worst]:.2f}% at draft {worst + 1} ({found.name}, the largest)"
        if found.errors[worst] <= BAR:
            return f"{says}: within {100 * BAR:.0f}%"
        if 2.0 * found.chance.max() > BAR:
            more = (2.0 * found.chance.max() / BAR) ** 2
            return (
                f"{says}: {self.blocks} blocks are too few to tell, chance alone makes {100 * found.chance.max():.2f}%; "
                f"hold out {more:.1f} times as many tokens to know {100 * BAR:.0f}%"
            )
        return f"{says}: above {100 * BAR:.0f}%, of which chance makes {100 * found.chance[worst]:.2f}%"

    def doubts(self) -> list[str]:
        """Reasons not to believe the figures."""
        mean, error = self.surprise
        if abs(mean) < max(_SURPRISING, 6.0 * error):
            return []
        heat = f"answers of this target at temperature {self.rule.temperature:g}"
        how = f"{abs(mean):.2f} nats a token {'less' if mean > 0.0 else 'more'} likely than {heat}"
        return [f"warning: the held-out texts are {how}: made by another model or temperature, or with top-p or top-k?"]


def evaluate(
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
) -> Evaluation:
    """Decode held-out texts again with drafts, see `walk`, and calibrate on the halves of them.

    Texts of one prompt stay in one half: answers to it resemble each other.
    """
    sizes = {"batch_size": batch_size, "max_length": max_length}
    blocks = walk(model, target, texts, rule, **sizes, device=device, seed=seed, progress=progress)
    prompts: dict[tuple[int, ...], int] = {}
    number = [prompts.setdefault(text.token_ids[: text.prompt_length], len(prompts)) for text in texts]
    return summarise(blocks, np.array(number)[blocks.text] % 2 == 0, rule, len(texts), seed)


def summarise(blocks: Blocks, first: NDArray[np.bool_], rule: Rule, texts: int, seed: int = 0) -> Evaluation:
    """The figures of blocks; `first` [n] are those of the first half of the texts."""
    width = blocks.logits.shape[1]
    if not len(blocks.kept):
        raise SpecDecodeError(f"no block in {texts} held-out texts; allowed: answers longer than a block of {width}")
    survival = (blocks.kept[:, None] > np.arange(width)).mean(axis=0)
    reached = np.concatenate([[1.0], survival[:-1]])
    return Evaluation(
        rule=rule,
        acceptance=survival / np.maximum(reached, 1e-12),
        survival=survival,
        accepted_length=1.0 + float(survival.sum()),
        raw=_calibration(
            "as it is", lambda logits, *_: TemperatureScaling.identity(logits.shape[1]), blocks, first, seed
        ),
        sts=_calibration("after STS", fit_sts, blocks, first, seed),
        offset=_calibration("STS with offsets", fit_scaling, blocks, first, seed),
        blocks=len(blocks.kept),
        texts=texts,
        surprise=(float(blocks.surprise.mean()), float(blocks.surprise.std() / len(blocks.kept) ** 0.5)),
    )


def _calibration(name: str, fit: Fit, blocks: Blocks, first: NDArray[np.bool_], seed: int) -> Calibration:
    width = blocks.logits.shape[1]
    predicted = np.zeros(blocks.logits.shape)
    for seen in (first, ~first):
        predicted[~seen] = _fitted(fit, blocks, seen).survival(blocks.logits[~seen])
    chance = np.stack([chance_errors(predicted[:, k], seed=seed + k) for k in range(width)])
    return Calibration(
        name=name,
        scaling=_fitted(fit, blocks, np.ones_like(first)),
        errors=np.array([expected_calibration_error(predicted[:, k], blocks.kept > k) for k in range(width)]),
        chance=chance.mean(axis=1),
        chance_most=np.quantile(chance, 0.95, axis=1),
    )


def _fitted(fit: Fit, blocks: Blocks, rows: NDArray[np.bool_]) -> TemperatureScaling:
    if not rows.any():
        return TemperatureScaling.identity(blocks.logits.shape[1])
    logits, kept = blocks.logits[rows], blocks.kept[rows]
    return fit(logits, kept, np.full(len(kept), logits.shape[1]))


def _percent(calibration: Calibration, position: int) -> str:
    return f"{100 * calibration.errors[position]:.2f}%"
