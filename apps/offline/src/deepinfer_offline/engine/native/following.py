"""Which sequences a drafter has been told about, and how far: it is fed when it is asked, not when tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_specdec import Draft, Drafter

    from deepinfer_offline.engine.native.answer import Answer


class Following:
    """Feeds a drafter from the sequences themselves.

    Args:
        drafter: guesses from token ids.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._fed: dict[int, int] = {}  # sequence -> tokens that the drafter has

    def behind(self, answer: Answer) -> int:
        """Tokens of the sequence that the drafter does not have."""
        return len(answer.seq.tokens) - self._fed.get(answer.seq.seq_id, 0)

    def follows(self, answer: Answer) -> bool:
        """Whether the drafter was told about the sequence."""
        return answer.seq.seq_id in self._fed

    def draft(self, answers: Sequence[Answer], limits: np.ndarray, floor: float) -> Draft:
        """Tell the drafter all that the sequences have said, then let it guess; see `Drafter.propose`."""
        self.tell(answers)
        return self.drafter.propose([answer.seq.seq_id for answer in answers], limits, floor)

    def end(self, answer: Answer) -> None:
        """A sequence has ended: what it said last is kept for the others, its name is forgotten."""
        if self.follows(answer):
            self.tell([answer])
            del self._fed[answer.seq.seq_id]
            self.drafter.end(answer.seq.seq_id)

    def tell(self, answers: Iterable[Answer]) -> None:
        """Give the drafter what it does not have of the sequences."""
        for answer in answers:
            seq = answer.seq
            fed = self._fed.get(seq.seq_id)
            if fed is None:
                fed = seq.num_prompt  # what the sequence said itself is scored, not only read
                self.drafter.begin(seq.seq_id, seq.tokens[:fed])
            if fed < len(seq.tokens):
                self.drafter.extend(seq.seq_id, seq.tokens[fed:])
            self._fed[seq.seq_id] = len(seq.tokens)
