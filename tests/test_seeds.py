"""``--seed`` shifts what tests ask for, in this process and in those that they start."""

from __future__ import annotations

import random

import pytest
import torch

from tests import seeds


def test_the_default_run_shifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "0")
    assert (seeds.shift(3), seeds.shift("a 3")) == (3, "a 3")


def test_other_runs_have_other_numbers_and_each_seed_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for run in range(20):
        monkeypatch.setenv(seeds.VARIABLE, str(run))
        found |= {seeds.shift(seed) for seed in range(1000)} | {seeds.shift(f"{seed}") for seed in range(1000)}
        assert seeds.keep(3, "a p-value") == 3
    assert len(found) == 20 * 2000


def test_generators_without_an_owner_are_seeded_for_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for run in ("0", "0", "7"):
        monkeypatch.setenv(seeds.VARIABLE, run)
        seeds.seed_global_generators()
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


def test_a_run_has_the_seed_of_its_option(pytestconfig: pytest.Config) -> None:
    assert seeds.run_seed() == pytestconfig.getoption("seed")
