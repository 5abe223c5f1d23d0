"""The stream of random numbers: known answers of Philox2x64-10, independence of shape, uniformity."""

from __future__ import annotations

import numpy as np
from deepinfer_offline.sampling.random import child_seed, philox, request_seed, uniform

ONES = 2**64 - 1
# Counter low, counter high, key -> words; from the known-answer file of the authors' Random123 library.
KNOWN = [
    ((0, 0, 0), (0xCA00A0459843D731, 0x66C24222C9A845B5)),
    ((ONES, ONES, ONES), (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
    ((0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0), (0x0A5E742C2997341C, 0xB0F883D38000DE5D)),
]


def test_philox_gives_the_published_answers() -> None:
    counters = [np.array([case[0][i] for case in KNOWN], np.uint64) for i in range(3)]
    low, high = philox(*counters)
    assert [(int(a), int(b)) for a, b in zip(low, high, strict=True)] == [case[1] for case in KNOWN]


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 2**63, 100).astype(np.uint64), rng.integers(0, 10_000, 100)
    together = uniform(seeds, positions)
    order = rng.permutation(100)
    assert np.array_equal(uniform(seeds[order], positions[order]), together[order])
    assert all(uniform(seeds[i : i + 1], positions[i : i + 1])[0] == together[i] for i in range(0, 100, 9))


def test_draws_are_uniform_over_positions_seeds_and_purposes() -> None:
    for seeds, positions, purpose in (
        (np.full(100_000, 7, np.uint64), np.arange(100_000), 0),
        (np.arange(100_000).astype(np.uint64), np.full(100_000, 3), 0),
        (np.full(100_000, 7, np.uint64), np.arange(100_000), 1),
    ):
        numbers = uniform(seeds, positions, purpose)
        assert numbers.min() > 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        # chi-square with 99 degrees of freedom: mean 99, deviation 14; 6 deviations never fail by chance
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 185
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_purposes_are_independent() -> None:
    seeds, positions = np.full(20_000, 9, np.uint64), np.arange(20_000)
    assert abs(np.corrcoef(uniform(seeds, positions, 0), uniform(seeds, positions, 1))[0, 1]) < 0.04


def test_children_and_requests_have_streams_of_their_own() -> None:
    seeds = {child_seed(5, i) for i in range(1000)} | {child_seed(6, i) for i in range(1000)}
    assert len(seeds) == 2000
    assert child_seed(5, 3) == child_seed(5, 3)
    assert request_seed(0, "a") != request_seed(1, "a") != request_seed(1, "b")
