"""Two steps of a loop that runs ahead, enumerated with the planner that the engines use: its budgets do not move the output.

Step 1 verifies blocks A with the planner's budget. Step 2 verifies blocks B, which were drafted in step 1 behind what that step
emitted. Every block that can be drafted and every outcome of both verifications is weighed; the joint distribution of the first
tokens of both sequences is compared with the target's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from deepinfer_specdec import VerificationPlanner, admit
from deepinfer_specdec.simulation.exact import ToyProblem, branches
from deepinfer_specdec.verification.reference import verify_sequence

ROWS, VOCAB, BLOCK, TOKENS = (
    2,
    2,
    2,
    4,
)  # a sequence has at most 3 tokens after step 1, so at least 4 after filling step 2
EXACT = 1e-12  # float64 sums of some 10,000 products
# Seconds of a step with 0 to 4 drafts: with kinks, so that the best budget hangs on the survivals.
CURVES = (np.array([1.07, 1.59, 1.41, 1.27, 1.35]), np.array([1.40, 0.90, 1.62, 1.40, 1.92]))

Tokens = tuple[int, ...]


class TwoSteps:
    """The output of two steps.

    Args:
        seed: of the sequences' distributions.
        method: of verification.
        early: steps by which blocks are stamped too early: 0, or 1 for a lag that is one step short.
    """

    def __init__(self, seed: int, method: str, early: int) -> None:
        self.problem = ToyProblem.random(seed, ROWS, VOCAB, 2 * BLOCK + 1)  # contexts as long as two steps make them
        self.budgets: set[int] = set()
        self._seconds = CURVES[seed % len(CURVES)]
        self._method, self._early = method, early
        self._laws: dict[tuple[int, Tokens, Tokens, int], dict[Tokens, float]] = {}

    def output(self) -> np.ndarray:
        """float64 [VOCAB ** TOKENS] * ROWS."""
        total = np.zeros((VOCAB**TOKENS,) * ROWS)
        nothing = ((),) * ROWS
        for first, weight in self._drafted(nothing):
            lengths = self._lengths(first, nothing, first, nothing, step=1)
            laws = [self._emitted(row, (), first[row], lengths[row]).items() for row in range(ROWS)]
            for outcome in itertools.product(*laws):
                said = tuple(tokens for tokens, _ in outcome)
                seen = weight * float(np.prod([chance for _, chance in outcome]))
                for second, drafted in self._drafted(said):
                    lengths = self._lengths(first, nothing, second, said, step=2)
                    rows = [self._ends(row, said[row], second[row], lengths[row]) for row in range(ROWS)]
                    total += seen * drafted * np.multiply.outer(*rows)
        return total

    def target(self) -> np.ndarray:
        """What `output` must be."""
        return np.multiply.outer(*(self._filled(row, {(): 1.0}) for row in range(ROWS)))

    def _drafted(self, said: tuple[Tokens, ...]) -> Iterator[tuple[tuple[Tokens, ...], float]]:
        """Every pair of blocks that can be drafted behind `said`, with its probability."""
        for blocks in itertools.product(itertools.product(range(VOCAB), repeat=BLOCK), repeat=ROWS):
            chances = [
                self.problem.proposal[row][said[row] + block[:place]][block[place]]
                for row, block in enumerate(blocks)
                for place in range(BLOCK)
            ]
            yield blocks, float(np.prod(chances))

    def _lengths(
        self,
        old: tuple[Tokens, ...],
        before: tuple[Tokens, ...],
        current: tuple[Tokens, ...],
        said: tuple[Tokens, ...],
        step: int,
    ) -> list[int]:
        """What `step` verifies of the `current` blocks. The planner has them too: the loop had to wait for them."""
        planner, slots = VerificationPlanner(ROWS, BLOCK), np.arange(ROWS)
        survivals = self._survivals(current, said)
        if step == 2:
            planner.record(0 - self._early, slots, self._survivals(old, before))
        planner.record(step - 1 - self._early, slots, survivals)
        budget = planner.budget(step, slots, self._seconds)
        self.budgets.add(budget)
        return admit(survivals, np.full(ROWS, BLOCK), budget).tolist()

    def _survivals(self, blocks: tuple[Tokens, ...], said: tuple[Tokens, ...]) -> np.ndarray:
        sure = [
            [self.problem.confidence(row, said[row] + block[:place]) for place in range(BLOCK)]
            for row, block in enumerate(blocks)
        ]
        return np.cumprod(np.array(sure, np.float32), axis=1)

    def _emitted(self, row: int, said: Tokens, block: Tokens, length: int) -> dict[Tokens, float]:
        """What a verification emits behind `said`."""
        key = row, said, block, length
        if key not in self._laws:
            target = np.array([self.problem.target[row][said + block[:place]] for place in range(length + 1)])
            proposal = np.array([self.problem.proposal[row][said + block[:place]] for place in range(length)])
            guesses, law = np.array(block[:length], np.int32), {}
            for tokens, chance in branches(
                lambda chance: tuple(verify_sequence(guesses, proposal, target, 0, chance, self._method))
            ):
                law[tokens] = law.get(tokens, 0.0) + chance
            self._laws[key] = law
        return self._laws[key]

    def _ends(self, row: int, said: Tokens, block: Tokens, length: int) -> np.ndarray:
        """float64 [VOCAB ** TOKENS], the first tokens of the row after step 2."""
        law = self._emitted(row, said, block, length)
        return self._filled(row, {said + tokens: chance for tokens, chance in law.items()})

    def _filled(self, row: int, law: dict[Tokens, float]) -> np.ndarray:
        """The first tokens of texts of any length, which go on as the target does."""
        found = np.zeros((VOCAB,) * TOKENS)
        for text, chance in law.items():
            for rest in itertools.product(range(VOCAB), repeat=max(0, TOKENS - len(text))):
                whole = text + rest
                chances = [self.problem.target[row][whole[:place]][whole[place]] for place in range(len(text), TOKENS)]
                found[whole[:TOKENS]] += chance * float(np.prod(chances))
        return found.ravel()


def distance(steps: TwoSteps) -> float:
    """Total variation between the output and the target."""
    return 0.5 * float(np.abs(steps.output() - steps.target()).sum())


@pytest.mark.parametrize("method", ["standard", "block"])
def test_budgets_of_two_steps_leave_the_output_as_it_is(method: str) -> None:
    budgets = set()
    for seed in (3, 15, 18, 21):
        steps = TwoSteps(seed, method, early=0)
        assert distance(steps) <= EXACT
        budgets |= steps.budgets
    assert len(budgets) > 2, "the budget must hang on the blocks, or it is exact for no reason"


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_lag_one_step_short_moves_the_output(method: str) -> None:
    assert max(distance(TwoSteps(seed, method, early=1)) for seed in (3, 15, 21)) > 1e-2
