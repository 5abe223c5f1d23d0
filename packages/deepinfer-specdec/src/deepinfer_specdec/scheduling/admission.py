"""Which drafts of a block are verified: the `budget` most likely ones, by a rule that never looks at a drawn token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def admit(survivals: NDArray[np.floating], counts: NDArray[np.integer], budget: int) -> NDArray[np.int32]:
    """Lengths int32 [R] that admit the `budget` drafts of highest survival.

    Survival never grows along a row, so the admitted ones are prefixes. Equal survivals go to the earlier column, then
    to the lower row: a rule that does not depend on any token's value (specdec page, A.4).

    Args:
        survivals: [R, K], non-increasing along rows (`Draft.survivals`); column j computed from tokens before j only.
        counts: [R], drafts that exist.
        budget: drafts to admit over all rows.
    """
    rows, width = survivals.shape
    available = int(counts.sum())
    if budget >= available:
        return np.asarray(counts, dtype=np.int32).copy()
    if budget <= 0:
        return np.zeros(rows, dtype=np.int32)
    # Column-major: among equal keys a stable order is then column first, row second. Drafts that do not exist come
    # last.
    exists = np.arange(width) < counts[:, None]
    keys = np.where(exists, survivals, -1.0).T.ravel()
    threshold = np.partition(keys, keys.size - budget)[keys.size - budget]
    admitted = keys > threshold
    ties = np.flatnonzero(keys == threshold)
    admitted[ties[: budget - int(admitted.sum())]] = True
    return admitted.reshape(width, rows).sum(axis=0).astype(np.int32)
