"""Counter-based random numbers: a draw depends on (seed, position) alone, never on the batch or the chunking."""

from __future__ import annotations

import hashlib

import numpy as np

_MULTIPLIER = np.uint64(
    0xD2B74407B1CE6E93
)  # Philox2x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(seeds: np.ndarray, positions: np.ndarray, purpose: int = 0) -> np.ndarray:
    """One uniform number per row.

    Args:
        seeds: uint64 [n], the stream of each row.
        positions: int64 [n], the index in the sequence of the token to draw.
        purpose: 0 for drawing a token; other numbers give independent draws for the same position (verification).

    Returns:
        float64 [n] in the open interval (0, 1), multiples of 2^-53 shifted by half a step.
    """
    low, _ = philox(positions.astype(np.uint64), np.full(len(positions), purpose, np.uint64), seeds.astype(np.uint64))
    return ((low >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def philox(low: np.ndarray, high: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Philox2x64-10: counters (low, high) and key, all uint64 [n], to two random words."""
    for _ in range(_ROUNDS):
        product_high, product_low = _multiply(low)
        low, high = product_high ^ key ^ high, product_low
        key = key + _WEYL
    return low, high


def _multiply(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 128-bit product with the multiplier, as (high, low) words, from 32-bit halves."""
    a, b = value >> _HALF, value & _LOW
    c, d = _MULTIPLIER >> _HALF, _MULTIPLIER & _LOW
    middle = b * c + ((b * d) >> _HALF)
    middle_low = a * d + (middle & _LOW)
    return a * c + (middle >> _HALF) + (middle_low >> _HALF), value * _MULTIPLIER


def child_seed(seed: int, index: int) -> int:
    """The stream of answer `index` of a request with this seed, a 64-bit number. Answer 0 is not the seed itself."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def request_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that names none: fixed by the engine's seed and the request's id."""
    return int.from_bytes(hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest(), "little")
