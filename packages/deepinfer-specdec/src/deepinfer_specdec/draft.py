"""The package's vocabulary: what a drafter guessed and what verification made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import DraftShapeError

PAD = -1  # fills token ids past a row's count


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for a batch of R sequences, at most K tokens each. Column j guesses the token j + 1 places after the
    anchor.

    The anchor is the last token that a sequence emitted. Rows are ragged: entries at or past `counts[r]` are padding.

    Attributes:
        token_ids: int32 [R, K], padded with -1.
        counts: int32 [R], 0..K.
        confidences: float32 [R, K], probability that column j is accepted given that all earlier columns were.
            Column j must be computed without looking at token j (specdec page, A.4); padding is 0.
        distributions: float64 or float32 [R, K, V], what each token was drawn from, after the same temperature, filters
            and masks as the target; None when every token is a deterministic function of the context (a one-hot
            distribution).
    """

    token_ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    confidences: NDArray[np.float32]
    distributions: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2:
            raise DraftShapeError(f"token_ids has shape {self.token_ids.shape}; allowed: [sequences, draft length]")
        rows, width = self.token_ids.shape
        if self.counts.shape != (rows,):
            raise DraftShapeError(f"counts has shape {self.counts.shape}; allowed: {(rows,)}")
        if self.confidences.shape != (rows, width):
            raise DraftShapeError(f"confidences has shape {self.confidences.shape}; allowed: {(rows, width)}")
        if rows and (int(self.counts.min()) < 0 or int(self.counts.max()) > width):
            raise DraftShapeError(f"counts span {self.counts.min()}..{self.counts.max()}; allowed: 0..{width}")
        if self.distributions is not None and self.distributions.shape[:2] != (rows, width):
            raise DraftShapeError(
                f"distributions has shape {self.distributions.shape}; allowed: {(rows, width)} + (vocab,)"
            )

    @property
    def rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """Columns, the longest draft that fits."""
        return self.token_ids.shape[1]

    def survivals(self) -> NDArray[np.float32]:
        """float32 [R, K]: probability that column j and everything before it is accepted; 0 past the count."""
        inside = np.arange(self.width, dtype=np.int32) < self.counts[:, None]
        return np.cumprod(np.where(inside, self.confidences, np.float32(0)), axis=1, dtype=np.float32)

    def trimmed(self, lengths: NDArray[np.int32]) -> Draft:
        """The same draft cut to `lengths` int32 [R]; the distributions are shared, not copied."""
        counts = np.minimum(self.counts, lengths).astype(np.int32)
        inside = np.arange(self.width, dtype=np.int32) < counts[:, None]
        return Draft(
            np.where(inside, self.token_ids, np.int32(PAD)),
            counts,
            np.where(inside, self.confidences, np.float32(0)),
            self.distributions,
        )

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int]], confidences: Sequence[Sequence[float]], width: int | None = None
    ) -> Draft:
        """Pack ragged one-hot guesses; `width` defaults to the longest row (at least 1)."""
        if width is None:
            width = max(1, max((len(row) for row in rows), default=1))
        lengths = [len(row) for row in rows]
        for index, (length, sure) in enumerate(zip(lengths, confidences, strict=True)):
            if length != len(sure) or length > width:
                raise DraftShapeError(
                    f"row {index}: {length} tokens, {len(sure)} confidences; allowed: equal, <= {width}"
                )
        counts = np.array(lengths, dtype=np.int32)
        inside = np.arange(width, dtype=np.int32) < counts[:, None]
        token_ids = np.full((len(rows), width), PAD, dtype=np.int32)
        token_ids[inside] = list(chain.from_iterable(rows))
        packed = np.zeros((len(rows), width), dtype=np.float32)
        packed[inside] = list(chain.from_iterable(confidences))
        return cls(token_ids, counts, packed)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification step emits.

    Accepted length, here and everywhere in DeepInfer: tokens emitted per verification step, the bonus token included.

    Attributes:
        token_ids: int32 [R, K + 1], the emitted tokens, padded with -1: the accepted drafts, then the correction after
            a rejection or the bonus token after a fully accepted draft.
        accepted: int32 [R], drafts kept, 0..K. Row r emits `accepted[r] + 1` tokens.
    """

    token_ids: NDArray[np.int32]
    accepted: NDArray[np.int32]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 [R]: accepted lengths, the bonus included."""
        return self.accepted + np.int32(1)

    def emitted(self, row: int) -> list[int]:
        """The tokens that row `row` emits."""
        return self.token_ids[row, : int(self.accepted[row]) + 1].tolist()
