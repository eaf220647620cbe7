"""The noise is uniform, independent in every coordinate, and a pure function of its coordinates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from kernels.common.noise import SAMPLE, Ints, Words, gumbel_noise, hash_noise, noise_streams, uniform_noise

MASK = (1 << 64) - 1
LEVEL = 1e-4
"""Probability that a sound generator fails one of these tests. Seeds are fixed, so the results do not change."""


def words(*values: int) -> Ints:
    return np.array(values, np.uint64).view(np.int64)


def streams(seed: int, keys: int, position: int = 0, purpose: int = SAMPLE) -> Words:
    """Return one stream for each of the first ``keys`` keys."""
    return noise_streams(np.full(keys, seed), np.arange(keys), np.full(keys, position), purpose)


def uniforms(of: Words, vocab: int) -> npt.NDArray[np.float64]:
    return uniform_noise(of[:, None], np.arange(vocab))


def reference_hash(seed: int, key: int, position: int, purpose: int, token: int) -> int:
    """Return the hash computed with Python's unbounded integers, as in the SplitMix64 paper."""

    def finalise(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    row = finalise((seed + gamma) & MASK)
    for coordinate in (key, position, purpose):
        row = finalise(((row ^ (coordinate & MASK)) + gamma) & MASK)
    return finalise((row + (token + 1) * gamma) & MASK)


def test_the_hash_equals_its_definition_in_unbounded_integers() -> None:
    seeds, keys, positions = [0, 1, MASK, 1 << 63], [0, MASK, 12345, 1 << 40], [0, 1, 4095, 1 << 30]
    ours = hash_noise(noise_streams(words(*seeds), words(*keys), words(*positions), 3)[:, None], np.arange(50))
    for row, (seed, key, position) in enumerate(zip(seeds, keys, positions, strict=True)):
        assert ours[row].tolist() == [reference_hash(seed, key, position, 3, token) for token in range(50)]


def test_splitmix64_gives_its_published_first_value() -> None:
    """Compared with the first output of the public-domain reference implementation for seed 1234567."""
    assert reference_hash_stream(1234567) == 6457827717110365317


def reference_hash_stream(seed: int) -> int:
    from kernels.common.noise import GAMMA, _mix

    return int(_mix(np.array([seed], np.uint64) + GAMMA)[0])


def test_uniforms_are_evenly_distributed_over_the_unit_interval() -> None:
    draws = uniforms(streams(42, 64), 4096)
    assert 0 < float(draws.min()) < float(draws.max()) < 1
    assert stats.kstest(draws.ravel(), "uniform").pvalue > LEVEL
    counts, _ = np.histogram(draws, bins=1024, range=(0, 1))
    assert stats.chisquare(counts).pvalue > LEVEL


def test_the_low_bits_of_the_uniforms_are_evenly_distributed() -> None:
    draws = uniforms(streams(7, 64), 4096)
    low = ((draws * 2.0**52).astype(np.int64) & 1023).ravel()
    assert stats.chisquare(np.bincount(low, minlength=1024)).pvalue > LEVEL


@pytest.mark.parametrize("varied", ["seed", "key", "position", "purpose", "token"])
def test_neighbours_in_every_coordinate_are_independent(varied: str) -> None:
    """Joint counts (16 by 16 cells) of two samples that differ by one in one coordinate, tested for independence."""
    rows, vocab = 256, 256
    base = {"seed": np.full(rows, 5), "key": np.arange(rows), "position": np.full(rows, 9)}
    moved = {name: value + (name == varied) for name, value in base.items()}
    first = uniforms(noise_streams(**base, purpose=SAMPLE), vocab + 1)
    second = uniforms(noise_streams(**moved, purpose=SAMPLE + (varied == "purpose")), vocab + 1)
    if varied == "token":
        first, second = first[:, :-1], second[:, 1:]
    cells = (first * 16).astype(np.int64) * 16 + (second * 16).astype(np.int64)
    # Neighbouring keys compare rows with each other; every pair counts once.
    table = np.bincount(cells.ravel(), minlength=256)
    assert stats.chisquare(table).pvalue > LEVEL


def test_swapping_coordinates_changes_the_noise() -> None:
    rows = [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3), (3, 2, 1, 4)]
    found = {int(noise_streams(words(s), words(k), words(p), q)[0]) for s, k, p, q in rows}
    assert len(found) == len(rows)


def test_a_row_does_not_depend_on_the_others_nor_a_token_on_its_neighbours() -> None:
    seeds, keys, positions = np.arange(9), np.arange(9) * 7, np.arange(9) * 11
    together = gumbel_noise(noise_streams(seeds, keys, positions, SAMPLE)[:, None], np.arange(100))
    for row in range(9):
        alone = noise_streams(seeds[row : row + 1], keys[row : row + 1], positions[row : row + 1], SAMPLE)
        tokens = np.array([99, 3, 50])
        assert gumbel_noise(alone, tokens).tolist() == together[row, tokens].tolist()


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(streams(3, 32, 1)[:, None], np.arange(4096))
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > LEVEL
