"""Whether a step drafts at all: for drafters that cost time in every step, whatever is verified of their drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError

_OTHER_LOAD = 2.0  # so many times the rows of the last drafts, or as few: what they told is no answer for this load


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """Thresholds of `DraftingSwitch`. A step here is a step without drafts at the load of the moment.

    Attributes:
        share: of the time that drafting may lose in the long run: what looks cost, and what it loses before it stops.
        enter: forecast gain from which a look makes every step draft again.
        patience: loss, in steps, at which drafting stops; also the time that new sequences may borrow for a look.
        reserve: gain, in steps, that is set against later losses at most; also the most that is saved up for looks.
    """

    share: float = 0.01
    enter: float = 1.03
    patience: float = 0.5
    reserve: float = 0.75

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise SpecDecodeError(f"share {self.share}; allowed: between 0 and 1")
        if not self.enter >= 1.0:
            raise SpecDecodeError(f"enter {self.enter}; allowed: >= 1")
        if not (self.patience > 0.0 and self.reserve >= 0.0):
            raise SpecDecodeError(
                f"patience {self.patience}, reserve {self.reserve}; allowed: > 0 and >= 0 steps, respectively"
            )


def drafting_gain(tokens: NDArray[np.float64], rows: int, seconds: NDArray[np.float64], drafting: float) -> float:
    """Tokens a second of steps that draft and verify the best budget, over those of steps that do neither.

    Args:
        tokens: float64 [n + 1], see `expected_tokens`.
        rows: sequences that emit a token whatever is verified.
        seconds: float64 [m + 1], of a step that verifies 0..m drafts and makes none.
        drafting: seconds that making them adds.
    """
    size = min(tokens.size, seconds.size)
    rates = (rows + tokens[:size]) / (seconds[:size] + drafting)
    return float(rates.max() * seconds[0] / rows)


class DraftingSwitch:
    """On: every step drafts. Off: a step in so many does, to look whether drafts would pay by now.

    An account of time holds both. It earns `share` of the time that passes and pays for looks and for what spells of drafting
    lose; there is no look, and no spell, while it is overdrawn. So however often forecasts are wrong, all losses together stay
    within `share` of the time, and a constant. A spell ends when it has lost `patience`, its gains counting up to `reserve`. One
    that gained on the whole leaves no debt: texts change.

    New sequences, and a load of which nothing is known, bring the next look forward by what they may borrow.

    Nothing here reads a clock: ranks that are told the same decide the same.
    """

    def __init__(self, options: DraftingOptions | None = None) -> None:
        self.options = options or DraftingOptions()
        self.on = True
        self.changes = 0
        self._account = 0.0  # seconds
        self._spent = 0.0  # seconds, by the last look
        self._balance = 0.0  # steps won in this spell, at most the reserve; negative: lost
        self._won = 0.0  # the same without a limit
        self._idle = False  # it has just gone on: its first drafts are not there to be verified
        self._rows = 0  # of the last drafts

    def wanted(self, rows: int, new: int, plain: float) -> bool:
        """Whether a step is to draft. Changes nothing.

        Args:
            rows: sequences that it would draft for.
            new: those of them that never had a draft.
            plain: seconds of the step without drafts.
        """
        if self.on or not rows:
            return self.on
        known = rows < _OTHER_LOAD * self._rows and self._rows < _OTHER_LOAD * rows
        news = new / rows if known else 1.0
        return self._account > -news * self.options.patience * plain

    def passed(self, plain: float, drafting: float, drafted_rows: int) -> None:
        """A step has passed that drafted for `drafted_rows` sequences, which added `drafting` seconds; 0 for none."""
        self._book(self.options.share * plain, plain)
        if drafted_rows:
            self._rows = drafted_rows
            if self._idle or not self.on:
                self._account -= drafting
                self._spent = drafting
            self._idle = False

    def judge(self, gain: float, plain: float) -> None:
        """Drafts have come in, by which drafting would have `gain` (`drafting_gain`) at the load of the moment."""
        options = self.options
        if not self.on:
            if gain >= options.enter and self._account + self._spent > -options.patience * plain:
                self._turn(True)
            return
        won = gain - 1.0
        self._book(won * plain, plain)
        self._won += won
        self._balance = min(options.reserve, self._balance + won)
        if self._balance < -options.patience:
            if self._won > 0.0:
                self._account = max(self._account, 0.0)
            self._turn(False)

    def _book(self, seconds: float, plain: float) -> None:
        self._account = min(self._account + seconds, self.options.reserve * plain)

    def _turn(self, on: bool) -> None:
        self.on = self._idle = on
        self.changes += 1
        self._balance = self._won = 0.0
