"""What a drafter is told, and as what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepinfer_offline.engine.native.following import Following


class Told:
    """A drafter that keeps what it is told."""

    def __init__(self) -> None:
        self.read: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}

    def begin(self, sequence: int, tokens: list[int]) -> None:
        self.read[sequence], self.said[sequence] = list(tokens), []

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.said[sequence] += tokens

    def end(self, sequence: int) -> None:
        pass


def test_what_a_sequence_said_before_it_was_followed_counts_as_said() -> None:
    drafter: Any = Told()
    following = Following(drafter)
    answer: Any = SimpleNamespace(seq=SimpleNamespace(seq_id=7, num_prompt=3, tokens=[1, 2, 3, 4, 5]))
    following.tell([answer])
    assert (drafter.read[7], drafter.said[7]) == ([1, 2, 3], [4, 5])
    answer.seq.tokens.append(6)
    assert following.behind(answer) == 1
    following.end(answer)
    assert drafter.said[7] == [4, 5, 6]
    assert not following.follows(answer)
