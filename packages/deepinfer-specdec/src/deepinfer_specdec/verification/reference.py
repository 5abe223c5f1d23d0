"""Verification of one sequence in plain numpy: the definition that the batched torch twin and the exact tests are held
to.

Methods:
    coupled: draw the target's token at every position from its own stream and keep drafts while they agree. What is
        emitted is a function of (seed, position, context) alone, so it equals plain decoding token for token, under any
        schedule. For one-hot drafts it accepts exactly as often as rejection sampling.
    standard: speculative sampling (Leviathan et al. 2023; Chen et al. 2023): accept with min(1, p/q), else draw from
        max(0, p - q). One-hot drafts take the coupled path, which is the same rule drawn in another order.
    block: block verification (Sun et al. 2024): joint acceptance over the block, never shorter in expectation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import PAD, Draft, Verification
from deepinfer_specdec.errors import DraftShapeError, UnknownNameError
from deepinfer_specdec.verification import randomness
from deepinfer_specdec.verification.chance import Chance, CounterChance

METHODS = ("coupled", "standard", "block")


def verify(
    draft: Draft,
    target: NDArray[np.floating],
    seeds: Sequence[int] | NDArray[np.integer],
    anchors: Sequence[int] | NDArray[np.integer],
    method: str = "standard",
) -> Verification:
    """Verify a batch.

    Args:
        draft: R rows, at most K guesses each.
        target: probabilities [R, K + 1, V]; row k of a sequence is the target's distribution of the token k + 1 places
            after the anchor, given the anchor and the first k guesses, after masks, temperature and filters
            (`distribution`).
        seeds: [R], one per sequence.
        anchors: [R], position of the last emitted token of each sequence (0-based, prompt included).
        method: one of METHODS.

    Raises:
        DraftShapeError: shapes do not fit.
        UnknownNameError: no such method.
    """
    if target.ndim != 3 or target.shape[:2] != (draft.rows, draft.width + 1):
        raise DraftShapeError(f"target has shape {target.shape}; allowed: {(draft.rows, draft.width + 1)} + (vocab,)")
    tokens = np.full((draft.rows, draft.width + 1), PAD, dtype=np.int32)
    accepted = np.zeros(draft.rows, dtype=np.int32)
    for row in range(draft.rows):
        count = int(draft.counts[row])
        guesses = draft.token_ids[row, :count]
        proposal = None if draft.distributions is None else draft.distributions[row, :count]
        chance = CounterChance(int(seeds[row]))
        emitted = verify_sequence(guesses, proposal, target[row], int(anchors[row]), chance, method)
        tokens[row, : len(emitted)] = emitted
        accepted[row] = len(emitted) - 1
    return Verification(tokens, accepted)


def verify_sequence(
    guesses: NDArray[np.integer],
    proposal: NDArray[np.floating] | None,
    target: NDArray[np.floating],
    anchor: int,
    chance: Chance,
    method: str = "standard",
) -> list[int]:
    """Tokens that one sequence emits: `guesses` [k] drawn from `proposal` [k, V] (None: one-hot) against `target` [>= k
    + 1, V].
    """
    if method not in METHODS:
        raise UnknownNameError("verification method", method, list(METHODS))
    if method == "coupled" or (method == "standard" and proposal is None):
        return _coupled(guesses, target, anchor, chance)
    if proposal is None:
        proposal = np.eye(target.shape[-1])[guesses]
    if method == "standard":
        return _standard(guesses, proposal, target, anchor, chance)
    return _block(guesses, proposal, target, anchor, chance)


def _coupled(guesses: NDArray[np.integer], target: NDArray[np.floating], anchor: int, chance: Chance) -> list[int]:
    emitted: list[int] = []
    for k, guess in enumerate(guesses.tolist()):
        emitted.append(chance.draw(target[k], anchor + 1 + k))
        if emitted[-1] != guess:
            return emitted
    emitted.append(chance.draw(target[len(guesses)], anchor + 1 + len(guesses)))
    return emitted


def _standard(
    guesses: NDArray[np.integer],
    proposal: NDArray[np.floating],
    target: NDArray[np.floating],
    anchor: int,
    chance: Chance,
) -> list[int]:
    emitted: list[int] = []
    for k, guess in enumerate(guesses.tolist()):
        p, q = target[k], proposal[k]
        if not chance.accept(min(1.0, p[guess] / q[guess]), anchor + 1 + k):
            return [*emitted, chance.draw(residual(p, q), anchor + 1 + k)]
        emitted.append(guess)
    return [*emitted, chance.draw(target[len(guesses)], anchor + 1 + len(guesses))]


def _block(
    guesses: NDArray[np.integer],
    proposal: NDArray[np.floating],
    target: NDArray[np.floating],
    anchor: int,
    chance: Chance,
) -> list[int]:
    count = len(guesses)
    weight = np.ones(count + 1)  # probability that the first k guesses survive, given them
    for k, guess in enumerate(guesses.tolist()):
        weight[k + 1] = min(1.0, weight[k] * target[k, guess] / proposal[k, guess])
    kept = 0
    for k in range(1, count + 1):
        probability = weight[k]
        if k < count:
            excess = float(np.maximum(weight[k] * target[k] - proposal[k], 0.0).sum())
            room = excess + 1.0 - weight[k]
            probability = excess / room if room > 0.0 else 1.0
        if chance.accept(probability, anchor + k, anchor, randomness.BLOCK):
            kept = k
    emitted = guesses[:kept].tolist()
    last = target[kept] if kept == count else residual(weight[kept] * target[kept], proposal[kept])
    return [*emitted, chance.draw(last, anchor + 1 + kept)]


def residual(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    """Unnormalised max(0, p - q) [V]. Falls back to p where rounding left nothing: then p equals q and no draw reaches
    here except by an acceptance probability that rounded below 1."""
    excess = np.maximum(np.asarray(p, dtype=np.float64) - q, 0.0)
    return excess if excess.sum() > 0.0 else np.asarray(p, dtype=np.float64)
