"""The noise is uniform, independent in every coordinate, and a pure function of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.noise import SAMPLE, gumbel_noise, hash_noise, uniform_noise

MASK = (1 << 64) - 1
LEVEL = 1e-4
"""Chance that a sound generator fails one of these tests; their seeds are fixed, so they do not flicker."""


def words(*values: int) -> Tensor:
    return torch.tensor([value - (1 << 64) if value >> 63 == 1 else value for value in values])


def reference_hash(seed: int, key: int, position: int, purpose: int, token: int) -> int:
    """The same hash in Python's unbounded integers, written from the SplitMix64 paper."""

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
    ours = hash_noise(words(*seeds), words(*keys), words(*positions), 3, 50)
    for row, (seed, key, position) in enumerate(zip(seeds, keys, positions, strict=True)):
        expected = [reference_hash(seed, key, position, 3, token) for token in range(50)]
        assert [value & MASK for value in ours[row].tolist()] == expected


def test_splitmix64_gives_its_published_first_value() -> None:
    """The first output of the public-domain reference implementation with seed 1234567."""
    assert reference_hash_stream(1234567) == 6457827717110365317


def reference_hash_stream(seed: int) -> int:
    from kernels.noise import _GAMMA, _finalise

    return int(_finalise(torch.tensor([seed]) + _GAMMA)) & MASK


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    draws = uniform_noise(torch.full((64,), 42), torch.arange(64), torch.zeros(64, dtype=torch.int64), SAMPLE, 4096)
    assert 0 < float(draws.min()) < float(draws.max()) < 1
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > LEVEL
    counts, _ = np.histogram(draws.numpy(), bins=1024, range=(0, 1))
    assert stats.chisquare(counts).pvalue > LEVEL


def test_the_low_bits_of_the_uniforms_are_even_too() -> None:
    draws = uniform_noise(torch.full((64,), 7), torch.arange(64), torch.zeros(64, dtype=torch.int64), SAMPLE, 4096)
    low = ((draws * 2.0**52).to(torch.int64) & 1023).flatten().numpy()
    assert stats.chisquare(np.bincount(low, minlength=1024)).pvalue > LEVEL


@pytest.mark.parametrize("varied", ["seed", "key", "position", "purpose", "token"])
def test_neighbours_in_every_coordinate_are_independent(varied: str) -> None:
    """Joint counts of two draws that differ by one in one coordinate, against independence (16 by 16 cells)."""
    rows, vocab = 256, 256
    base = {"seed": torch.full((rows,), 5), "key": torch.arange(rows), "position": torch.full((rows,), 9)}
    moved = {name: value + (name == varied) for name, value in base.items()}
    first = uniform_noise(*base.values(), SAMPLE, vocab + 1)
    second = uniform_noise(*moved.values(), SAMPLE + (varied == "purpose"), vocab + 1)
    if varied == "token":
        first, second = first[:, :-1], second[:, 1:]
    cells = (first * 16).to(torch.int64) * 16 + (second * 16).to(torch.int64)
    # Neighbouring keys compare rows with each other; every pair counts once.
    table = np.bincount(cells.flatten().numpy(), minlength=256)
    assert stats.chisquare(table).pvalue > LEVEL


def test_swapping_coordinates_changes_the_noise() -> None:
    rows = [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3), (3, 2, 1, 4)]
    streams = {tuple(hash_noise(words(s), words(k), words(p), q, 4)[0].tolist()) for s, k, p, q in rows}
    assert len(streams) == len(rows)


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds, keys, positions = torch.arange(9), torch.arange(9) * 7, torch.arange(9) * 11
    together = gumbel_noise(seeds, keys, positions, SAMPLE, 100)
    for row in range(9):
        one = slice(row, row + 1)
        torch.testing.assert_close(
            gumbel_noise(seeds[one], keys[one], positions[one], SAMPLE, 100), together[one], rtol=0, atol=0
        )


def test_gumbel_noise_has_the_gumbel_law() -> None:
    noise = gumbel_noise(torch.full((32,), 3), torch.arange(32), torch.ones(32, dtype=torch.int64), SAMPLE, 4096)
    assert bool(noise.isfinite().all())
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > LEVEL
