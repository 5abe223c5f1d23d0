"""Pages that part in the middle: how many of their first tokens another sequence can copy."""

from __future__ import annotations

from collections.abc import Sequence


class PartialIndex:
    """Tokens of pages, found by the key of the page before them.

    An open page (still being filled) may be noted as far as it is filled: positions below that never change while
    the page has its owner.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, dict[int, tuple[list[int], int]]] = {}  # parent key -> page -> (tokens, step)
        self._parents: dict[int, bytes] = {}

    def note(self, parent: bytes, page: int, tokens: Sequence[int], step: int) -> None:
        """`page` follows the page `parent` and starts with `tokens`, which step `step` (or an earlier one) computes."""
        self.forget(page)
        self._children.setdefault(parent, {})[page] = (list(tokens), step)
        self._parents[page] = parent

    def find(self, parent: bytes, tokens: Sequence[int], step: int) -> tuple[int, int]:
        """The page after `parent` that shares most first tokens with `tokens`, and how many.

        Only pages whose tokens were computed by steps before `step` count: they are copied before `step` runs.
        """
        best = (0, 0)
        for page, (own, computed) in self._children.get(parent, {}).items():
            if computed < step:
                length = _common_prefix(own, tokens)
                if length > best[1]:
                    best = (page, length)
        return best

    def forget(self, page: int) -> None:
        """The page's content goes away. Unknown pages are ignored."""
        parent = self._parents.pop(page, None)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[page]
            if not siblings:
                del self._children[parent]

    def pages(self) -> list[int]:
        """Every page that is noted."""
        return list(self._parents)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
