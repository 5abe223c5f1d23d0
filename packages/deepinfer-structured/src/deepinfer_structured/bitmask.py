"""Token masks: int32 words, bit `t % 32` of word `t // 32` is set when token `t` may come next."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Words of one row: ceil(vocab_size / 32)."""
    return (vocab_size + 31) // 32


def allocate_mask(rows: int, vocab_size: int) -> Mask:
    """A mask `[rows, ceil(vocab_size / 32)]` int32 in which every token is allowed."""
    return np.full((rows, mask_words(vocab_size)), -1, dtype=np.int32)


def address(mask: Mask) -> int:
    """Where a writable, contiguous mask begins in memory. (`mask.ctypes.data` takes as long as a whole mask does.)"""
    return ctypes.addressof(ctypes.c_char.from_buffer(mask.data))


def allowed_tokens(row: Mask, vocab_size: int) -> NDArray[np.int64]:
    """The allowed token ids of one mask row, ascending."""
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits)


def apply_mask(logits: NDArray[np.floating], mask: Mask) -> None:
    """Set the logits `[n, vocab]` of forbidden tokens to -inf, in place; ids past the mask's end are forbidden."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=-1, bitorder="little").astype(bool)
    width = min(bits.shape[-1], logits.shape[-1])
    logits[..., :width][~bits[..., :width]] = -np.inf
    logits[..., width:] = -np.inf


def set_only(row: Mask, token_ids: tuple[int, ...]) -> None:
    """Allow exactly these tokens in one row, in place."""
    row[:] = 0
    words = row.view(np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << (token % 32))
