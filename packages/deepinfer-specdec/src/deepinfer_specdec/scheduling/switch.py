"""Whether to speculate at all: on when it pays, off when it does not, without flapping."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.costs import load_of

_RECOVERY = 0.004  # share of lost trust that comes back per step
_ONE_FAILURE = 0.9  # of the trust that is left at least: a few steps are a poor sample
_LEAST_TRUST = 0.75  # a gain of 1.38 and more is tried again however often lesser ones have failed


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """Thresholds of `SpeculationSwitch`. A gain is time without speculation over time with it, for the same tokens.

    Attributes:
        enter: expected gain from which speculation is switched on.
        forecasts: steps that an expected gain is averaged over.
        memory: steps that a measured gain is averaged over.
        patience: loss, in steps, at which it is switched off.
        reserve: gain, in steps, that is set against later losses at most; what was won long ago pays for nothing.
        idle: time lost, in steps, to waiting for drafts that do not come, at which it is switched off.
        settle: steps after switching on before measurements may switch it off again.
        pause: steps that it rests for after failing; doubled with every failure in a row.
        longest_pause: most steps of a pause.
    """

    enter: float = 1.03
    forecasts: float = 2.0
    memory: float = 8.0
    patience: float = 0.5
    reserve: float = 0.75
    idle: float = 1.0
    settle: int = 3
    pause: int = 8
    longest_pause: int = 128

    def __post_init__(self) -> None:
        if not self.enter > 1.0:
            raise SpecDecodeError(f"enter {self.enter}; allowed: > 1")
        if not (self.patience > 0.0 and self.idle > 0.0 and self.reserve >= 0.0):
            raise SpecDecodeError(
                f"patience {self.patience}, idle {self.idle}, reserve {self.reserve}; allowed: > 0, > 0 and >= 0 steps"
            )
        if min(self.memory, self.forecasts, self.settle, self.pause) < 1 or self.longest_pause < self.pause:
            raise SpecDecodeError(f"{self}; allowed: memory, forecasts, settle, pause >= 1 and longest_pause >= pause")


class _Gain:
    """Ratio of two sums that fade with the same rate."""

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.clear()

    def clear(self) -> None:
        self._without = self._with = 0.0
        self.steps = 0

    def add(self, seconds_without: float, seconds_with: float) -> None:
        self._without = self._without * self._keep + seconds_without
        self._with = self._with * self._keep + seconds_with
        self.steps += 1

    @property
    def value(self) -> float:
        return self._without / self._with if self._with > 0.0 else 1.0


class SpeculationSwitch:
    """Two states with different evidence: off listens to forecasts (what drafts that nobody verified would have saved),
    on listens to the clock. Three ways lead off: drafts that lose time when they are verified, which lowers the trust in
    forecasts and makes the next try wait, longer every time; waiting for drafts that do not come, which does neither; and
    both in a mix, as their sum.

    Args:
        options: thresholds.
        least: forecasts that must agree. One sequence's is true for as long as its text goes on like that; those of many differ
            from step to step, and the best of several would be too good.
    """

    def __init__(self, options: SwitchOptions | None = None, least: int = 1) -> None:
        self.options = options or SwitchOptions()
        self.least = least
        self.on = False
        self.changes = 0
        self._expected = _Gain(self.options.forecasts)
        self._measured = _Gain(self.options.memory)
        self._balance = 0.0  # steps won since it went on, at most the reserve; negative: lost
        self._won = 0.0  # the same without a limit
        self._idle = 0.0  # steps lost to waiting since drafts were last verified
        self._pause = self.options.pause
        self._resting = 0  # steps to come without forecasts
        self._trust = 1.0  # what forecasts have been worth lately: measured over expected gain
        self._promised = 1.0

    @property
    def gain(self) -> float:
        """The gain that the present state rests on."""
        return self._measured.value if self.on else self._expected.value

    def rest(self) -> bool:
        """Off: a step has passed; returns whether it is too early for a forecast after a failure."""
        self._trust += _RECOVERY * (1.0 - self._trust)
        self._resting = max(0, self._resting - 1)
        return self._resting > 0

    @property
    def promising(self) -> bool:
        """Off: whether the forecasts so far promise enough, be they few."""
        return self._expected.steps > 0 and self._expected.value * self._trust >= self.options.enter

    def expect(self, seconds_without: float, seconds_with: float) -> bool:
        """Off and not resting: take in a forecast of one step; returns whether speculation is on now."""
        self._expected.add(seconds_without, seconds_with)
        if self.promising and self._expected.steps >= self.least:
            self._promised = self._expected.value * self._trust
            self._turn(True)
        return self.on

    def try_on(self) -> None:
        """Switch on without a forecast: for drafters whose forecasts cost as much as speculation does. The clock decides."""
        if not self.on:
            self._promised = self.options.enter
            self._turn(True)

    def measure(self, seconds_without: float, seconds_with: float) -> bool:
        """On: take in the clock of one step that verified drafts; returns whether speculation is still on."""
        if not seconds_with > 0.0:
            return self.on
        self._idle = 0.0
        self._measured.add(seconds_without, seconds_with)
        won = seconds_without / seconds_with - 1.0
        self._won += won
        self._balance = min(self.options.reserve, self._balance + won)
        return self._weigh()

    def wait(self, lost: float) -> bool:
        """On: a step verified nothing, as there was nothing to verify, and lost this share of a step by waiting for drafts;
        returns whether speculation is still on.
        """
        self._idle += lost
        self._won -= lost
        self._balance -= lost
        if self._idle >= self.options.idle:
            self._turn(False)
        return self.on and self._weigh()

    def successor(self, least: int) -> SpeculationSwitch:
        """A switch for another load that was never met: in the same state, with the same trust, and no failures of its own."""
        made = SpeculationSwitch(self.options, least)
        made.on, made._trust, made._promised = self.on, self._trust, self._promised
        return made

    def _weigh(self) -> bool:
        """Go off when too much was lost."""
        if self._balance < -self.options.patience and self._measured.steps >= self.options.settle:
            if self._won > 0.0:
                self._pause = self.options.pause
            else:
                kept = min(1.0, max(_ONE_FAILURE, self._measured.value / self._promised))
                self._trust = max(_LEAST_TRUST, self._trust * kept)
                self._resting = self._pause
                self._pause = min(2 * self._pause, self.options.longest_pause)
            self._turn(False)
        return self.on

    def _turn(self, on: bool) -> None:
        self.on = on
        self.changes += 1
        self._balance = self._won = 0.0
        self._idle = (
            0.5 * self.options.idle if on else 0.0
        )  # a forecast that was wrong at once is worth half the patience
        self._expected.clear()
        self._measured.clear()


class LoadSwitches:
    """One switch for each load: a job's last few sequences are not judged by what drafts cost when there were many."""

    def __init__(self, options: SwitchOptions | None = None) -> None:
        self._current = SpeculationSwitch(options)
        self._by_load: dict[int, SpeculationSwitch] = {}

    @property
    def current(self) -> SpeculationSwitch:
        """The switch of the load that was met last."""
        return self._current

    @property
    def changes(self) -> int:
        """How often speculation was switched on or off, over all loads."""
        return sum(switch.changes for switch in self._by_load.values())

    def meet(self, rows: int) -> SpeculationSwitch:
        """The switch of the load of `rows` sequences becomes the current one. A load met first goes on as the last one did."""
        load = load_of(rows)
        if load not in self._by_load:
            least = 1 + load // 2
            if not self._by_load:
                self._current.least = least
            self._by_load[load] = self._current.successor(least) if self._by_load else self._current
        self._current = self._by_load[load]
        return self._current
