"""How much side work a loop may do: a share of the time that passes."""

from __future__ import annotations

from deepinfer_specdec.errors import SpecDecodeError


class WorkCredit:
    """Seconds that side work may take. What is spent beyond the credit is paid back before the next piece of work.

    Over any stretch the work takes at most `share` of the time, plus `most`, plus the overrun of its last piece.

    Args:
        share: of the time that passes, in (0, 1).
        start: seconds to begin with.
        most: seconds that can be saved up.
    """

    def __init__(self, share: float, start: float, most: float) -> None:
        if not 0.0 < share < 1.0:
            raise SpecDecodeError(f"share {share}; allowed: between 0 and 1")
        if not 0.0 <= start <= most:
            raise SpecDecodeError(f"start {start}, most {most}; allowed: 0 <= start <= most")
        self._share = share
        self._most = most
        self._seconds = start

    @property
    def ready(self) -> bool:
        """Whether work may begin."""
        return self._seconds > 0.0

    def earn(self, passed: float) -> None:
        """`passed` seconds have gone by. Negative ones (a clock that stepped back) are ignored."""
        self._seconds = min(self._most, self._seconds + self._share * max(0.0, passed))

    def spend(self, seconds: float) -> None:
        """Work took `seconds`."""
        self._seconds -= max(0.0, seconds)
