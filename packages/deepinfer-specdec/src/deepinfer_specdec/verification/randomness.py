"""Counter-based random numbers: a pure function of (seed, position, stream), so trimming a draft shifts no other draw.

The generator is the 64-bit finaliser of SplitMix64 applied three times over the mixed key; the torch twin makes the
same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Streams. TARGET draws the emitted token (correction or bonus); one (seed, position) emits once, so it is used once.
TARGET = 0
ACCEPT = 1
# Draws of these two may be looked at and thrown away, then drawn again for the same position from a later anchor. They
# are keyed by the anchor too: a reused number could be correlated with another row's schedule and through it bias this
# one.
DRAFT = 2
BLOCK = 3

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX2)
    return value ^ (value >> np.uint64(31))


def _as_uint64(value: object) -> NDArray[np.uint64]:
    return (
        np.asarray(value).astype(np.int64, copy=False).view(np.uint64) if not _is_uint64(value) else np.asarray(value)
    )


def _is_uint64(value: object) -> bool:
    return getattr(value, "dtype", None) == np.uint64


def uniform(seed: object, position: object, stream: int, anchor: object = 0) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one for each broadcast element.

    Args:
        seed: int64 or uint64, scalar or array: the request's seed (a different one per completion).
        position: int64, index of the token in its sequence, prompt included.
        stream: one of TARGET, ACCEPT, DRAFT, BLOCK.
        anchor: int64, position of the block's anchor; used by DRAFT and BLOCK, 0 otherwise.
    """
    with np.errstate(over="ignore"):
        key = _mix(_as_uint64(seed) + np.uint64(GOLDEN))
        key = _mix(key ^ (_as_uint64(position) * np.uint64(GOLDEN) + np.uint64(stream)))
        key = _mix(key + _as_uint64(anchor) * np.uint64(MIX1) + np.uint64(GOLDEN))
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53
