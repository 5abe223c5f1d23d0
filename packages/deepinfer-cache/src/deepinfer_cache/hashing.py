"""Chained block hashes: the name of a page is a digest of everything before it and of itself."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16


def chain_hashes(
    token_ids: Sequence[int] | np.ndarray, page_size: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of every full page of `token_ids`.

    Two equal digests mean equal tokens from position 0 to the end of the page, under the same salt and page size
    (blake2b, 128 bits).

    Args:
        token_ids: ids, each in [0, 2**32).
        page_size: tokens of a page.
        salt: separates users or models that must not share; part of the first digest.
        known: digests of the first pages, computed before; they are kept and not computed again.

    Returns:
        One digest of 16 bytes for each full page.
    """
    count = len(token_ids) // page_size
    hashes = list(known[:count])
    if len(hashes) == count:
        return hashes
    data = np.asarray(token_ids[len(hashes) * page_size : count * page_size], dtype=np.uint32).tobytes()
    width = 4 * page_size
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=DIGEST_BYTES, person=b"deepinfer-root").digest()
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
