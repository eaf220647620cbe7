"""Seeds of all random weights, inputs and prompts of the tests: ``pytest --seed N`` shifts them."""

from __future__ import annotations

import os
import random
import sys
from typing import TypeVar

import numpy as np
import pytest

Seed = TypeVar("Seed", int, str)

VARIABLE = "TESTS_SEED"
"""Environment variable with the run's seed, which processes that a test starts inherit."""


def run_seed() -> int:
    """Return the run's seed: that of ``--seed``, or 0, which shifts nothing."""
    return int(os.environ.get(VARIABLE, "0"))


def shift(seed: Seed) -> Seed:
    """Return a test's own seed, shifted by the run's."""
    if isinstance(seed, str):
        return f"{seed} of run {run_seed()}" if run_seed() else seed
    return seed + 1_000_003 * run_seed()


def keep(seed: Seed, reason: str) -> Seed:
    """Return a seed that no run shifts, since the test's meaning needs this one; ``reason`` says why."""
    assert reason
    return seed


def unshifted(reason: str) -> pytest.MarkDecorator:
    """Return the mark of tests that no other run repeats: those of p-values that random weights have a part in."""
    return pytest.mark.skipif(run_seed() != 0, reason=f"of the default seed alone: {reason}")


def seed_global_generators() -> None:
    """Seed the generators of random, numpy and torch that have no owner, as if each test ran alone."""
    random.seed(shift(0))
    np.random.seed(shift(0) % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(shift(0))
