"""The protocol of a drafter that works on token ids, and the one of a drafter that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of sequences that it follows from their prompts to their ends.

    A sequence is named by any integer that is unique among the live ones. The order of calls for one sequence is
    `begin`, any mix of `extend` and `propose`, `end`. Not thread-safe: one loop drives it.
    """

    @property
    def name(self) -> str:
        """Short name for statistics and `--speculative`."""

    @property
    def max_draft(self) -> int:
        """Longest draft it makes, in tokens."""

    def begin(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Follow a new sequence. `token_ids` is all of it so far: the prompt, plus earlier output after a preemption."""

    def extend(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens that the engine emitted for the sequence (verified ones only)."""

    def propose(self, sequences: Sequence[int], limits: NDArray[np.int32] | None = None, floor: float = 0.0) -> Draft:
        """Guess for `sequences`, one row each, in that order.

        Args:
            sequences: names of live sequences.
            limits: int32 [R], at most this many tokens per row; None for `max_draft`. Never more than `max_draft`.
            floor: survival below which a guess is worth nothing to the caller. A row may end with its first guess
                below it.
        """

    def end(self, sequence: int) -> None:
        """Forget a finished or preempted sequence. Unknown names are ignored."""


def row_limits(limits: NDArray[np.int32] | None, rows: int, most: int) -> list[int]:
    """The `limits` of `Drafter.propose` as a list [rows] of numbers up to `most`."""
    return [most] * rows if limits is None else np.minimum(limits, most).tolist()


class FeatureDrafter(Drafter, Protocol):
    """A drafter that also needs the target's hidden states (DSpark, the model's own `mtp.*` stages).

    The engine computes positions [start, start + n) of a sequence (a prefill chunk, a verification, a replay) and hands
    their features over before the next `propose`. After a prefix-cache hit the features of the hit are missing: the
    drafter then attends only to what it was given, which changes acceptance, never the output.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of the target layers whose outputs are concatenated into the features."""

    def observe(self, sequence: int, start: int, features: Any) -> None:
        """Store features [n, m * hidden] (torch, any float dtype) of positions [start, start + n); later ones are
        dropped.
        """
