"""The protocol that a grammar library is wrapped in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deepinfer_structured.bitmask import Mask


class EngineMatcher(Protocol):
    """The state of one sequence inside a grammar library."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first forbidden one; return how many were consumed."""

    def takes(self, token_ids: list[int]) -> bool:
        """Whether all of the tokens could be consumed from here. The state is unchanged."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` consumed tokens."""

    def fill(self, row: Mask) -> None:
        """Write the mask of the next token into one contiguous row; where only the end may follow, the mask of its ids."""

    def forced(self) -> list[int]:
        """The tokens that must come next, if only one continuation exists."""

    def accepting(self) -> bool:
        """Whether the text may end here."""

    def stopped(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""

    def check(self) -> None:
        """Raise MatcherError once the library has given up."""

    def clone(self) -> EngineMatcher: ...


class EngineGrammar(Protocol):
    """A grammar compiled for one vocabulary."""

    def matcher(self) -> EngineMatcher: ...
