"""What confidences have been worth lately: drafts that were kept against those that were to be kept."""

from __future__ import annotations

_PRIOR = 8.0  # drafts that say the hopes are right
_FADE = 0.98  # how the last steps outweigh earlier ones
_RETURN = 0.01  # share of the way back to the prior in a step that verifies nothing
_MOST = 1.2


class Hopes:
    """A factor on survivals. Below 1 mostly, however well confidences fit, since it is those that err upwards that are
    verified. One bad start does not last: while nothing is verified, what was seen fades.
    """

    def __init__(self) -> None:
        self._hoped = self._kept = _PRIOR

    @property
    def truth(self) -> float:
        """What hopes are worth: drafts kept over drafts that were to be kept on average."""
        return min(_MOST, self._kept / self._hoped)

    def settle(self, hoped: float, kept: float) -> None:
        """A step verified drafts of which `hoped` were to be kept on average, and `kept` were."""
        self._hoped = _FADE * self._hoped + hoped
        self._kept = _FADE * self._kept + kept

    def rest(self) -> None:
        """A step verified nothing."""
        self._hoped += _RETURN * (_PRIOR - self._hoped)
        self._kept += _RETURN * (_PRIOR - self._kept)
