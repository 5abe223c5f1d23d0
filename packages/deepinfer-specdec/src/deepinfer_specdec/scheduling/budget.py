"""How many drafts of a step to verify: the rules, each a pure function of survivals and costs.

All maximise expected tokens per second, theta(B) = (rows + expected accepted drafts) / seconds(tokens in the step).
They differ in what they may look at without moving the output distribution (specdec page, A.4):

    expected_budget    survivals of earlier blocks only; may search all B. For asynchronous loops.
    early_stop_budget  Algorithm 1 of the paper: the current block, stopping at the first B that is no better.
    lookahead_budget   the current block up to where it stops; beyond it earlier blocks say whether a better B lies
                       past a jag.
    live_budget        the current block, all B. Sound only where the output does not depend on the schedule: under
                       coupled verification.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.scheduling.cost import CostCurve

# A jag is crossed only for a gain above this share over the root of the rows: one row is a poor sample of the forecast.
MARGIN = 0.06
EDGE = 0.02  # share that the native engine's steps with drafts must promise over those without: forecasts err


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step carries besides drafts.

    Attributes:
        rows: sequences that emit a bonus or correction token.
        other_tokens: tokens of prefill chunks and of decode rows that only compute.
        draft_seconds: time that drafting takes in this step; it is spent whatever the budget.
        limit: most drafts that fit (logits memory, graph or token limit of the step).
    """

    rows: int
    other_tokens: int = 0
    draft_seconds: float = 0.0
    limit: int = 1 << 30

    def seconds(self, curve: CostCurve, most: int) -> NDArray[np.float64]:
        """float64 [most + 1], seconds of the step with 0..most drafts."""
        return curve.span(self.rows + self.other_tokens, most + 1) + self.draft_seconds


def expected_tokens(survivals: NDArray[np.floating]) -> NDArray[np.float64]:
    """float64 [n + 1]: expected accepted drafts when the best 0..n are verified, n the number of positive survivals."""
    flat = survivals.ravel()
    ranked = np.sort(flat[flat > 0.0])[::-1]
    return np.concatenate([[0.0], np.cumsum(ranked, dtype=np.float64)])


def best_budget(tokens: NDArray[np.float64], rows: int, seconds: NDArray[np.float64], edge: float = 0.0) -> int:
    """Drafts to verify for the most expected tokens per second; 0 where that is not more than without drafts.

    Args:
        tokens: float64 [n + 1], see `expected_tokens`; of earlier blocks under an asynchronous loop (module's warning).
        rows: sequences that emit a token whatever is verified.
        seconds: float64 [m + 1], of the step with 0..m drafts; budgets go to the smaller of n and m.
        edge: share by which a budget above 0 must beat 0: forecasts err, and plain decoding is the safe choice.
    """
    size = min(tokens.size, seconds.size)
    rate = (rows + tokens[:size]) / seconds[:size]
    best = int(rate.argmax())
    return best if rate[best] > rate[0] * (1.0 + edge) else 0


def expected_budget(tokens: NDArray[np.float64], load: StepLoad, curve: CostCurve, edge: float = 0.0) -> int:
    """`best_budget` of a step that carries `load` and is priced by `curve`."""
    return best_budget(tokens, load.rows, load.seconds(curve, min(tokens.size - 1, load.limit)), edge)


def live_budget(survivals: NDArray[np.floating], load: StepLoad, curve: CostCurve, edge: float = 0.0) -> int:
    """Global argmax over the current block. Read the module's warning."""
    return expected_budget(expected_tokens(survivals), load, curve, edge)


def early_stop_budget(survivals: NDArray[np.floating], load: StepLoad, curve: CostCurve) -> int:
    """Algorithm 1 of the DSpark paper."""
    tokens = expected_tokens(survivals)
    most = min(tokens.size - 1, load.limit)
    rate = (load.rows + tokens[: most + 1]) / load.seconds(curve, most)
    stops = np.flatnonzero(rate[1:] <= rate[:-1])
    return int(stops[0]) if stops.size else most


def lookahead_budget(
    survivals: NDArray[np.floating], forecast: NDArray[np.float64], load: StepLoad, curve: CostCurve
) -> int:
    """Algorithm 1 that does not stop before a jag when earlier blocks promise a better rate behind it.

    Where the rate stops rising at B, the drafts beyond B are unknown (looking at them would bias the output), so their
    survivals are taken from `forecast` (`expected_tokens` of earlier blocks), shifted to what the current block has
    shown up to B. If that promises a better rate at some B', all drafts up to B' are admitted and there is no way back.
    """
    tokens = expected_tokens(survivals)
    most = min(tokens.size - 1, load.limit)
    seconds = load.seconds(curve, most)
    rate = (load.rows + tokens[: most + 1]) / seconds
    far = np.diff(np.concatenate([forecast, np.full(max(0, most + 1 - forecast.size), forecast[-1])])[: most + 1])
    at = 0
    while at < most:
        falls = np.flatnonzero(rate[at + 1 :] <= rate[at:-1])
        if not falls.size:
            return most
        at += int(falls[0])
        # Draft at + 1 is next in line, so its survival may be used: it depends only on tokens that are admitted
        # already.
        # Later ones are as the forecast has them, in proportion: survivals are products, so a low start lowers the rest.
        scale = min(1.0, (tokens[at + 1] - tokens[at]) / far[at]) if far[at] > 0.0 else 0.0
        further = np.concatenate([[0.0], np.cumsum(scale * far[at + 1 :])])
        promised = (load.rows + tokens[at + 1] + further) / seconds[at + 1 :]
        best = int(promised.argmax())
        if promised[best] <= rate[at] * (1.0 + MARGIN / load.rows**0.5):
            return at
        at += 1 + best
    return most
