"""Drafts of rows that a grammar constrains: what the grammar forces, else the drafter's guess as far as it is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from deepinfer_specdec import Draft

from deepinfer_offline.engine.native.answer import Answer

FORCED = 0.98
"""Confidence in a forced token. The mask leaves no other text, but its text may be split into tokens otherwise."""


def within_grammars(draft: Draft, answers: Sequence[Answer], limits: np.ndarray) -> Draft:
    """The draft with the rows of constrained answers cut before the first token that their grammar refuses.

    Where the grammar leaves one continuation, its tokens are the draft. The matchers are as before afterwards; they must
    stand after the last token that their sequences have said.

    Args:
        draft: R rows without distributions.
        answers: of the rows.
        limits: int32 [R], most drafts of each row.
    """
    rows, confidences = [], []
    for answer, ids, sure, count, limit in zip(
        answers,
        draft.token_ids.tolist(),
        draft.confidences.tolist(),
        draft.counts.tolist(),
        limits.tolist(),
        strict=True,
    ):
        guess, trust = ids[:count], sure[:count]
        if answer.matcher is not None:
            guess, trust = _within(answer, guess, trust, limit)
        rows.append(guess)
        confidences.append(trust)
    return Draft.from_rows(rows, confidences)


def _within(answer: Answer, guess: list[int], trust: list[float], limit: int) -> tuple[list[int], list[float]]:
    forced = answer.matcher.forced_tokens()[:limit]
    if forced:
        agreed = guess[: len(forced)] == forced
        guess = forced + (guess[len(forced) :] if agreed else [])
        trust = [FORCED] * len(forced) + (trust[len(forced) :] if agreed else [])
    allowed = answer.matcher.allows(guess)
    return guess[:allowed], trust[:allowed]
