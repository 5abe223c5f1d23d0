"""The state of one sequence in its grammar: accept tokens, roll back, fill masks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_structured.bitmask import Mask, allocate_mask, mask_words, set_only
from deepinfer_structured.errors import MatcherError
from deepinfer_structured.guard_tables import clear

if TYPE_CHECKING:
    from deepinfer_structured.engines.base import EngineMatcher
    from deepinfer_structured.guard import Guard
    from deepinfer_structured.vocab import Vocabulary
    from deepinfer_structured.whitespace import Whitespace

_FARTHEST = 100  # tokens looked ahead
_LONGEST_NUMBER = 16  # tokens; a number that could only repeat for so long is given up
_MOST_LOOKS = 300  # places looked at to tell whether something can follow one token


class Matcher:
    """Follows one sequence. Not thread-safe; different matchers may be used by different threads.

    The end-of-sequence token counts as an accepted token: it can be accepted where `is_accepting`, ends the matcher
    (`is_terminated`), and can be rolled back like any other.

    Attributes:
        native: the state inside the grammar library.
        guard: keeps items and keys distinct where the grammar does not; None where it does.
        whitespace: bounds whitespace where the grammar does not.
        vocabulary: what the grammar was compiled for.
        ended: whether the end-of-sequence token was accepted.
    """

    __slots__ = (
        "_count",
        "_looks",
        "_nowhere",
        "_shape",
        "_ways",
        "ended",
        "guard",
        "native",
        "vocabulary",
        "whitespace",
    )

    def __init__(
        self,
        native: EngineMatcher,
        vocabulary: Vocabulary,
        guard: Guard | None = None,
        whitespace: Whitespace | None = None,
    ) -> None:
        self.native = native
        self.guard = guard
        self.whitespace = whitespace
        self.vocabulary = vocabulary
        self._nowhere: set[int] | None = None  # tokens taken out of the mask of this place since nothing follows them
        self._looks = 0  # places looked at for the token in question
        self._ways: dict[Hashable, bool] = {}  # places of the guard, and whether something can follow there
        self._count = 0  # tokens accepted by the library, without the end-of-sequence token
        self.ended = False
        self._shape = (mask_words(vocabulary.size),)

    def __len__(self) -> int:
        """Accepted tokens, with the end-of-sequence token."""
        return self._count + self.ended

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first forbidden one; returns how many were accepted. Never raises for bad tokens."""
        for i, token in enumerate(token_ids):
            if self.ended:
                return i
            if token in self.vocabulary.eos_ids:
                if not self.native.accepting():
                    return i
                self.ended = True
            elif not 0 <= token < len(self.vocabulary.tokens) or not self._goes_on(token):
                return i
            else:
                self._count += 1
                self._nowhere = None
        return len(token_ids)

    def _accept(self, token: int) -> bool:
        whitespace = self.whitespace
        if whitespace is not None and not whitespace.accept(token):
            return False
        if self.native.accept([token]) == 1:
            if self.guard is None or self.guard.accept(token):
                return True
            self.native.rollback(1)
        if whitespace is not None:
            whitespace.rollback(1)
        return False

    def _take_back(self, count: int) -> None:
        self.native.rollback(count)
        if self.guard is not None:
            self.guard.rollback(count)
        if self.whitespace is not None:
            self.whitespace.rollback(count)

    def rollback(self, count: int) -> None:
        """Forget the last `count` accepted tokens.

        Raises:
            ValueError: more than were accepted, or a negative count.
        """
        if not 0 <= count <= len(self):
            raise ValueError(f"cannot roll back {count} of {len(self)} accepted tokens")
        if count and self.ended:
            self.ended = False
            count -= 1
        if count:
            self._take_back(count)
            self._count -= count
            self._nowhere = None
            self._ways.clear()

    def fill_mask(self, row: Mask) -> None:
        """Write the mask of the next token into a contiguous int32 row of `ceil(vocabulary.size / 32)` words, in place.

        After the end only the end-of-sequence ids are allowed. Does not change the matcher's state.

        Raises:
            ValueError: a row of another width or type.
            MatcherError: the library hit its limits.
        """
        if row.shape != self._shape or row.dtype != np.int32 or not row.flags.c_contiguous:
            raise ValueError(f"expected a contiguous int32 row of {self._shape[0]} words, got {row.dtype} {row.shape}")
        if self.ended:
            set_only(row, self.vocabulary.eos_ids)
        else:
            self.native.fill(row)
            if self.narrowed:
                self.restrict(row)

    @property
    def narrowed(self) -> bool:
        """Whether `restrict` may have something to do here."""
        return self.guard is not None or (self.whitespace is not None and self.whitespace.place > self.whitespace.free)

    def restrict(self, row: Mask) -> None:
        """Take out of a row that the library has filled what the bound on whitespace and the guard forbid, in place.

        Raises:
            MatcherError: nothing is left: the vocabulary cannot go on without whitespace, or the grammar asks for another
                item where no distinct one is possible.
        """
        if self.whitespace is not None and (kept := self.whitespace.kept()) is not None:
            row &= kept
            if not row.any():
                raise MatcherError("every token that may follow goes beyond the longest run of blanks (max_whitespace)")
        if self.guard is None:
            return
        self.guard.restrict(row)
        self._nowhere = {t for tokens in self.guard.along(row) if not self._survives(tokens[0]) for t in tokens}
        clear(row, self._nowhere)
        if self.guard.idle(row):
            raise MatcherError(
                "no distinct array item or key is left that the schema allows (uniqueItems, minProperties)"
            )

    def _goes_on(self, token: int) -> bool:
        """Whether a token can be accepted and something can follow it, so that a mask offers it."""
        if self.guard is None:
            return self._accept(token)
        if self._nowhere is not None:
            return token not in self._nowhere and self._accept(token)
        if not self._accept(token):
            return False
        self._take_back(1)  # the guard reads no text that the grammar does not take
        row = allocate_mask(1, self.vocabulary.size)[0]
        set_only(row, (token,))
        return all(self._survives(tokens[0]) for tokens in self.guard.along(row)) and self._accept(token)

    def _survives(self, token: int, depth: int = 0) -> bool:
        """Whether something that is no repetition can follow a token; assumed where it cannot be told (see `_beyond`).

        Whitespace is not something, and never the only way to go on.
        """
        assert self.guard is not None
        if self.guard.lives(token, self.native.takes):
            return True
        if not self._accept(token):
            return False
        place, found = self.guard.place, self._beyond(depth)
        if found is None:
            found = self._ways.get(place)
        if found is None:
            row = allocate_mask(1, self.vocabulary.size)[0]
            self.native.fill(row)
            if self.whitespace is not None and (kept := self.whitespace.kept()) is not None:
                row &= kept
            self.guard.restrict(row)
            further = self.guard.along(row)
            clear(row, (t for tokens in further for t in tokens))
            found = not self.guard.idle(row) or any(self._survives(tokens[0], depth + 1) for tokens in further)
            self._ways[place] = found
        self._take_back(1)
        return found

    def _beyond(self, depth: int) -> bool | None:
        """What is assumed of the place of the guard if it is too far away to be looked at; None if it is not."""
        assert self.guard is not None
        self._looks = self._looks + 1 if depth else 0
        far = _LONGEST_NUMBER if self.guard.in_number else _FARTHEST
        return not self.guard.in_number if depth >= far or self._looks >= _MOST_LOOKS else None

    def fill_draft_masks(self, draft: Sequence[int], rows: Mask) -> int:
        """Masks for a draft block: row i is the mask after the first i draft tokens.

        Rows after the first forbidden draft token (or after the end) are left untouched. The state is unchanged.

        Args:
            draft: k token ids.
            rows: int32 `[k + 1, words]`.

        Returns:
            How many draft tokens the grammar allows and has a mask after: that many rows and one more are filled. A draft
            that leads to where nothing is left to say is no error, and stops before that.

        Raises:
            MatcherError: there is no first mask.
        """
        accepted = filled = 0
        self.fill_mask(rows[0])
        try:
            for i, token in enumerate(draft):
                if self.accept([token]) != 1:
                    break
                accepted += 1
                self.fill_mask(rows[i + 1])
                filled += 1
        except MatcherError:
            rows[filled + 1] = -1
        finally:
            self.rollback(accepted)
        return filled

    def allows(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens could be accepted from here. The state is unchanged."""
        accepted = self.accept(token_ids)
        self.rollback(accepted)
        return accepted

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next because the grammar leaves one continuation; may be empty."""
        forced = [] if self.is_terminated else self.native.forced()
        # Whitespace is never forced, so no forced token breaks its bound: outside strings there is always another way.
        return forced if self.guard is None else forced[: self.allows(forced)]

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here: an end-of-sequence token would be accepted."""
        return not self.ended and self.native.accepting()

    @property
    def is_terminated(self) -> bool:
        """Whether nothing but the end of the sequence can follow."""
        return self.ended or self.native.stopped()

    def clone(self) -> Matcher:
        """An independent copy in the same state."""
        whitespace = self.whitespace and self.whitespace.clone()
        other = Matcher(self.native.clone(), self.vocabulary, self.guard and self.guard.clone(), whitespace)
        other._count, other.ended = self._count, self.ended
        return other

    def mask(self) -> Mask:
        """The mask of the next token as a new row."""
        row = allocate_mask(1, self.vocabulary.size)[0]
        self.fill_mask(row)
        return row

    def accept_text(self, data: bytes) -> bool:
        """Accept bytes token by token with single-byte tokens; for vocabularies that have all of them.

        Raises:
            MatcherError: the vocabulary lacks a single-byte token for one of the bytes.
        """
        table = {t: i for i, t in enumerate(self.vocabulary.tokens) if len(t) == 1}
        try:
            ids = [table[bytes([b])] for b in data]
        except KeyError as error:
            raise MatcherError(f"the vocabulary has no token for byte {error}") from None
        return self.accept(ids) == len(ids)
