"""Who is who in vLLM's batch. vLLM hands a proposer token rows without request ids, and moves rows between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_EDGE = 32  # tokens compared at both ends of what is known of a sequence


@dataclass(slots=True)
class _Followed:
    name: int
    length: int
    head: bytes
    tail: bytes


@dataclass(slots=True)
class RowTracker:
    """Follows sequences by their tokens.

    A row continues a sequence when its tokens begin and, at the length known so far, end like it. Two sequences that are
    equal so far are interchangeable, so a mix-up between them is none. A wrong match could only cost acceptance: a
    proposer's drafts are verified.
    """

    _rows: dict[int, _Followed] = field(default_factory=dict)
    _next: int = 0

    def update(
        self, rows: list[int], lengths: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Match this step's rows to the sequences of the last one.

        Args:
            rows: batch rows that hold a request.
            lengths: [rows], tokens known of each row.
            tokens: [rows, max_len].

        Returns:
            For each of `rows` its sequence's name and how many of its tokens were known before (0: a new sequence), and
            the names that are in no row any more.
        """
        old, self._rows = self._rows, {}
        taken: set[int] = set()
        found: list[tuple[int, int]] = []
        for row in rows:
            length = int(lengths[row])
            line = tokens[row, :length]
            place = row if self._continues(old.get(row), line) and row not in taken else None
            if place is None:
                place = next((p for p, f in old.items() if p not in taken and self._continues(f, line)), None)
            if place is None:
                followed, before = _Followed(self._next, 0, b"", b""), 0
                self._next += 1
            else:
                taken.add(place)
                followed, before = old[place], old[place].length
            followed.length, followed.head = length, _bytes(line[:_EDGE])
            followed.tail = _bytes(line[max(0, length - _EDGE) : length])
            self._rows[row] = followed
            found.append((followed.name, before))
        gone = [f.name for p, f in old.items() if p not in taken]
        return found, gone

    @staticmethod
    def _continues(followed: _Followed | None, line: NDArray[np.integer]) -> bool:
        if followed is None or followed.length > len(line):
            return False
        known = line[: followed.length]
        return _bytes(known[:_EDGE]) == followed.head and _bytes(known[-_EDGE:]) == followed.tail


def _bytes(tokens: NDArray[np.integer]) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
