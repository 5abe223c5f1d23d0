"""The training loop: cosine schedule with warm-up, gradient clipping, checkpoints to resume from."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.train.agreement import Rule
from deepinfer_specdec.train.blocks import Texts, run_blocks, sample_anchors
from deepinfer_specdec.train.data import Text, batches, collate
from deepinfer_specdec.train.losses import LossWeights, block_losses
from deepinfer_specdec.train.progress import Progress
from deepinfer_specdec.train.target import Target


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The recipe of the paper, in sizes that one device takes.

    Attributes:
        steps: optimiser steps.
        batch_size: texts per step.
        anchors: blocks per text.
        max_length: tokens of a text.
        learning_rate, warmup, clip: AdamW without weight decay; warm-up is a share of the steps, then a cosine to 0.
        save_every: steps between checkpoints.
        seed: of data order and anchors.
        low_precision: multiply in bfloat16 (weights, sums of the losses and the optimiser stay float32).
        losses: weights.
        rule: the verification that the confidences are for.
    """

    steps: int = 1000
    batch_size: int = 8
    anchors: int = 64
    max_length: int = 1024
    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    save_every: int = 200
    seed: int = 0
    low_precision: bool = False
    losses: LossWeights = field(default_factory=LossWeights)
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "anchors", "max_length", "save_every"):
            if getattr(self, name) < 1:
                raise SpecDecodeError(f"{name} {getattr(self, name)}; allowed: >= 1")


def train(
    model: DSparkModel,
    target: Target,
    texts: Sequence[Text],
    options: TrainOptions,
    checkpoint: Path | None = None,
    *,
    device: str = "cpu",
    progress: bool = True,
) -> list[float]:
    """Train `model` in place up to `options.steps`, going on from `checkpoint` if that file exists.

    Returns:
        The loss of every step taken in this call.

    Raises:
        SpecDecodeError: the checkpoint is damaged, or was made with another recipe.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    first = _resume(model, optimizer, options, checkpoint, device)
    bar, smooth = Progress("training", first, options.steps, progress), None
    history: list[float] = []
    size = min(options.batch_size, len(texts))
    for step, batch in zip(range(first, options.steps), batches(texts, size, options.seed, first), strict=False):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, options)
        history.append(
            _step(model, target, collate(batch, target, options.max_length, device), optimizer, options, step)
        )
        smooth = history[-1] if smooth is None else 0.95 * smooth + 0.05 * history[-1]
        bar.show(step + 1, f"loss {smooth:.4f}")
        if checkpoint is not None and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
            _save(model, optimizer, options, checkpoint, step + 1)
    bar.close()
    return history


def _step(
    model: DSparkModel,
    target: Target,
    texts: Texts,
    optimizer: torch.optim.Optimizer,
    options: TrainOptions,
    step: int,
) -> float:
    # Anchors depend on the step alone, so a resumed run sees the same ones.
    generator = torch.Generator().manual_seed(options.seed * 7_919 + step)
    anchors, real = sample_anchors(texts.trainable, options.anchors, generator)
    with torch.autocast(texts.token_ids.device.type, torch.bfloat16, enabled=options.low_precision):
        out = run_blocks(model, target.parts, texts, anchors, real)
    losses = block_losses(out, options.losses, options.rule)
    optimizer.zero_grad(set_to_none=True)
    losses.total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return float(losses.total.detach())


def _schedule(step: int, options: TrainOptions) -> float:
    warm = max(1, round(options.warmup * options.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, options.steps - warm)))


def _resume(
    model: DSparkModel,
    optimizer: torch.optim.Optimizer,
    options: TrainOptions,
    checkpoint: Path | None,
    device: str,
) -> int:
    if checkpoint is None or not checkpoint.exists():
        return 0
    try:
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        made, step = dict(state["made"]), int(state["step"])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise SpecDecodeError(
            f"{checkpoint}: {type(error).__name__}, not a checkpoint of this version; delete it to start over"
        ) from error
    for name, value in _recipe(model, options).items():
        if made.get(name) != value:
            raise SpecDecodeError(
                f"{checkpoint} was made with {name} {made.get(name)!r}, this command says {value!r}; "
                "allowed: the same, or another --output"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return step


def _recipe(model: DSparkModel, options: TrainOptions) -> dict[str, Any]:
    """What a checkpoint can only be continued with. `steps` may grow: the schedule goes on from where it would be."""
    recipe = {name: value for name, value in asdict(options).items() if name not in ("steps", "save_every")}
    return json.loads(json.dumps({**recipe, **model.config.to_dict()}))


def _save(
    model: DSparkModel, optimizer: torch.optim.Optimizer, options: TrainOptions, checkpoint: Path, step: int
) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    part = checkpoint.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save({**state, "made": _recipe(model, options)}, part)
    part.replace(checkpoint)  # whole or not at all: a killed run resumes from the last good one
