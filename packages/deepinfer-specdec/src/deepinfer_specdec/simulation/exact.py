"""Exact output distribution of a verification policy on small problems, by enumerating every random outcome.

The very code that runs in production is enumerated: `Chance` is replaced by one that walks all branches with their
    probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.verification.reference import verify_sequence

Tokens = tuple[int, ...]


class BranchingChance:
    """Makes the decisions of one branch: a given prefix of choices, then always the first possible one.

    After a run, `probability` is the branch's and `next_branch` the choices of the following one.
    """

    def __init__(self, choices: list[int]) -> None:
        self._choices = choices
        self._taken: list[tuple[int, list[float]]] = []
        self.probability = 1.0

    def accept(self, probability: float, position: int, anchor: int = 0, stream: int = 0) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def draw(self, weights: NDArray[np.floating], position: int, anchor: int = 0, stream: int = 0) -> int:
        return self._choose((np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist())

    def _choose(self, probabilities: list[float]) -> int:
        depth = len(self._taken)
        choice = self._choices[depth] if depth < len(self._choices) else _following(probabilities, -1)
        assert choice is not None
        self._taken.append((choice, probabilities))
        self.probability *= probabilities[choice]
        return choice

    def next_branch(self) -> list[int] | None:
        """Choices of the next branch in depth-first order; None after the last one."""
        for depth in range(len(self._taken) - 1, -1, -1):
            choice, probabilities = self._taken[depth]
            following = _following(probabilities, choice)
            if following is not None:
                return [taken for taken, _ in self._taken[:depth]] + [following]
        return None


def _following(probabilities: list[float], choice: int) -> int | None:
    return next((i for i in range(choice + 1, len(probabilities)) if probabilities[i] > 0.0), None)


def branches(run: Callable[[BranchingChance], Tokens]) -> Iterator[tuple[Tokens, float]]:
    """Every outcome of `run` with its probability."""
    choices: list[int] | None = []
    while choices is not None:
        chance = BranchingChance(choices)
        outcome = run(chance)
        yield outcome, chance.probability
        choices = chance.next_branch()


@dataclass(frozen=True)
class ToyProblem:
    """R sequences over a vocabulary of V tokens with random conditional distributions.

    Attributes:
        target: for each row, prefix -> probabilities [V].
        proposal: the drafter's, likewise; one-hot rows make a deterministic drafter.
        block: draft length.
        one_hot: hand no distributions to verification (the drafter is deterministic).
    """

    target: list[dict[Tokens, NDArray[np.float64]]]
    proposal: list[dict[Tokens, NDArray[np.float64]]]
    vocab: int
    block: int
    one_hot: bool = False

    @classmethod
    def random(cls, seed: int, rows: int = 2, vocab: int = 2, block: int = 2, one_hot: bool = False) -> ToyProblem:
        """Drafts that are close to the target after some prefixes and far off after others, as real ones are."""
        rng = np.random.default_rng(seed)
        prefixes = [p for n in range(block + 1) for p in itertools.product(range(vocab), repeat=n)]
        target = [{p: rng.dirichlet(np.full(vocab, 0.6)) for p in prefixes} for _ in range(rows)]
        proposal = []
        for row in range(rows):
            table = {}
            for prefix in prefixes:
                if one_hot:
                    table[prefix] = np.eye(vocab)[rng.integers(vocab)]
                else:
                    mix = rng.choice([0.05, 0.95])
                    table[prefix] = mix * target[row][prefix] + (1.0 - mix) * rng.dirichlet(np.ones(vocab))
            proposal.append(table)
        return cls(target, proposal, vocab, block, one_hot)

    def confidence(self, row: int, prefix: Tokens) -> float:
        """The analytic label of a confidence head: 1 - total variation between draft and target after `prefix`."""
        return 1.0 - 0.5 * float(np.abs(self.target[row][prefix] - self.proposal[row][prefix]).sum())


Policy = Callable[[Draft], NDArray[np.integer]]


def output_distribution(problem: ToyProblem, policy: Policy, method: str = "standard") -> NDArray[np.float64]:
    """Joint probabilities [V ** (block + 1)] * R of all rows' first block + 1 tokens after one verification step.

    Rows that emitted fewer tokens go on by plain sampling. `policy` maps the drafts to the lengths [R] to verify.
    """
    rows, block, vocab = len(problem.target), problem.block, problem.vocab
    drafts = list(itertools.product(range(vocab), repeat=block))
    cache: dict[tuple[int, Tokens, int], NDArray[np.float64]] = {}
    total = np.zeros((vocab ** (block + 1),) * rows)
    for blocks in itertools.product(drafts, repeat=rows):
        weight = float(np.prod([_draft_probability(problem, row, tokens) for row, tokens in enumerate(blocks)]))
        if weight == 0.0:
            continue
        lengths = policy(_as_draft(problem, blocks))
        joint: NDArray[np.float64] = np.asarray(weight)
        for row, tokens in enumerate(blocks):
            key = (row, tokens, int(lengths[row]))
            if key not in cache:
                cache[key] = _row_distribution(problem, *key, method=method)
            joint = np.multiply.outer(joint, cache[key])
        total += joint
    return total


def target_distribution(problem: ToyProblem) -> NDArray[np.float64]:
    """What `output_distribution` must be."""
    joint: NDArray[np.float64] = np.asarray(1.0)
    for table in problem.target:
        row = np.zeros(problem.vocab ** (problem.block + 1))
        for tokens in itertools.product(range(problem.vocab), repeat=problem.block + 1):
            row[_index(tokens, problem.vocab)] = np.prod([table[tokens[:i]][t] for i, t in enumerate(tokens)])
        joint = np.multiply.outer(joint, row)
    return joint


def total_variation(problem: ToyProblem, policy: Policy, method: str = "standard") -> float:
    """Distance in [0, 1] between the output under `policy` and the target."""
    return 0.5 * float(np.abs(output_distribution(problem, policy, method) - target_distribution(problem)).sum())


def _draft_probability(problem: ToyProblem, row: int, tokens: Tokens) -> float:
    return float(np.prod([problem.proposal[row][tokens[:i]][t] for i, t in enumerate(tokens)]))


def _as_draft(problem: ToyProblem, blocks: tuple[Tokens, ...]) -> Draft:
    confidences = [
        [problem.confidence(row, tokens[:i]) for i in range(problem.block)] for row, tokens in enumerate(blocks)
    ]
    distributions = np.array(
        [[problem.proposal[row][tokens[:i]] for i in range(problem.block)] for row, tokens in enumerate(blocks)]
    )
    return Draft(
        np.array(blocks, dtype=np.int32),
        np.full(len(blocks), problem.block, dtype=np.int32),
        np.array(confidences, dtype=np.float32),
        None if problem.one_hot else distributions,
    )


def _row_distribution(problem: ToyProblem, row: int, tokens: Tokens, length: int, method: str) -> NDArray[np.float64]:
    table = problem.target[row]
    guesses = np.array(tokens[:length], dtype=np.int32)
    target = np.array([table[tokens[:i]] for i in range(length + 1)])
    proposal = None if problem.one_hot else np.array([problem.proposal[row][tokens[:i]] for i in range(length)])

    def run(chance: BranchingChance) -> Tokens:
        emitted = verify_sequence(guesses, proposal, target, 0, chance, method)
        while len(emitted) <= problem.block:
            emitted.append(chance.draw(table[tuple(emitted)], len(emitted)))
        return tuple(emitted)

    result = np.zeros(problem.vocab ** (problem.block + 1))
    for outcome, probability in branches(run):
        result[_index(outcome, problem.vocab)] += probability
    return result


def _index(tokens: Tokens, vocab: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab + token
    return index


def expected_accepted(problem: ToyProblem, method: str) -> float:
    """Expected accepted drafts over all rows when every draft is verified."""
    total = 0.0
    for row, table in enumerate(problem.target):
        for tokens in itertools.product(range(problem.vocab), repeat=problem.block):
            weight = _draft_probability(problem, row, tokens)
            if weight == 0.0:
                continue
            target = np.array([table[tokens[:i]] for i in range(problem.block + 1)])
            proposal = np.array([problem.proposal[row][tokens[:i]] for i in range(problem.block)])
            guesses = np.array(tokens, dtype=np.int32)

            def run(chance: BranchingChance, g=guesses, q=proposal, p=target) -> Tokens:
                return tuple(verify_sequence(g, q, p, 0, chance, method))

            total += weight * sum(probability * (len(emitted) - 1) for emitted, probability in branches(run))
    return total


def policy_lengths(problem: ToyProblem, policy: Policy) -> list[NDArray[np.integer]]:
    """The lengths that `policy` picks, for every draft that can be drawn."""
    drafts = list(itertools.product(range(problem.vocab), repeat=problem.block))
    return [policy(_as_draft(problem, blocks)) for blocks in itertools.product(drafts, repeat=len(problem.target))]
