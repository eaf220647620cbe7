"""Measured costs of steps: what slows some steps of a simulated engine down does not count as cost of drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.speculation.control.controller import FixedController
from tests.engine.speculation.control.costs import adaptive, always, fixed, lookup, model, plain, small
from tests.engine.speculation.control.measures import measure_tokens_per_step
from tests.engine.speculation.simulation import AcceptanceCalibrator, Simulation, honest, informed
from tests.means import assert_mean_at_least
from tests.seeds import shift


def test_a_slower_machine_changes_decisions_only_briefly() -> None:
    ratios = []
    for seed in range(6):
        simulation, controller = Simulation(small, model, always(0.9), informed, seed=seed), adaptive()
        simulation.run(controller, 6000)
        usual = simulation.run(controller, 4000)
        simulation.step = lambda branches, tokens: 3 * small(branches, tokens)
        simulation.draft = lambda branches, depth: 3 * model(branches, depth)
        simulation.run(controller, 400)
        ratios.append(3 * simulation.run(controller, 4000) / usual)
    assert_mean_at_least(ratios, 0.97)


class AfterDrafts:
    """A machine whose plain step after a drafted one takes longer than after another plain step."""

    def __init__(self) -> None:
        self._cold = False

    def __call__(self, branches: int, tokens: int) -> float:
        cold, self._cold = self._cold, tokens > branches
        return 2e-3 if self._cold else 1.6e-3 if cold else 1e-3


def test_plain_steps_are_timed_among_other_plain_steps() -> None:
    """Comparing those after drafted ones would overestimate the gain of drafting."""
    shares = []
    for seed in range(6):
        ours, theirs = (Simulation(AfterDrafts(), lambda _b, _d: 1e-5, always(0.45), seed=seed) for _ in range(2))
        controller = adaptive()
        ours.run(controller, 4000)
        shares.append(ours.run(controller, 8000) / plain(theirs, 8000))
    assert_mean_at_least(shares, 0.97)


class Interrupted:
    """A small model's steps, one in eight of which takes ten times as long, with or without drafts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(shift(seed))

    def __call__(self, branches: int, tokens: int) -> float:
        return small(branches, tokens) * (10 if self._random.random() < 0.125 else 1)


def test_interrupted_steps_are_ignored_as_outliers() -> None:
    shares = []
    for seed in range(6):
        ours, theirs = (Simulation(Interrupted(seed), lookup, always(0.8), seed=seed) for _ in range(2))
        controller = adaptive()
        ours.run(controller, 2000)
        shares.append(ours.run(controller, 2500) / fixed(theirs, 2500))
    assert_mean_at_least(shares, 0.9)


class SlowFirstSteps:
    """A small model, whose first three steps of a size that it has not computed for 30 steps take three times as
    long.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seen: dict[int, tuple[int, int]] = {}

    def __call__(self, branches: int, tokens: int) -> float:
        self._steps += 1
        last, again = self._seen.get(tokens, (-100, 0))
        again = again + 1 if self._steps - last <= 30 else 1
        self._seen[tokens] = self._steps, again
        return small(branches, tokens) * (3 if tokens > branches and again <= 3 else 1)


def costly_start(branches: int, depth: int) -> float:
    """Return the time of drafting of any depth."""
    return 3e-4 if depth else 1e-5


def test_slow_first_steps_of_a_size_are_discarded() -> None:
    shares, gains = [], []
    for seed in range(6):

        def make(seed: int = seed) -> Simulation:
            return Simulation(SlowFirstSteps(), costly_start, always(0.7), length=2000, seed=seed)

        ours, controller = make(), adaptive()
        ours.run(controller, 4000)
        best = max(make().run(FixedController(depth, depth), 3000) for depth in (2, 3, 4, 6))
        shares.append(ours.run(controller, 3000) / best)
        gains.append(best / make().run(FixedController(0, 0), 3000))
    assert_mean_at_least(shares, 0.93)
    assert_mean_at_least(gains, 1.7)


@pytest.mark.parametrize("chances", [honest, informed])
def test_steps_that_record_kernels_do_not_count_as_cost_of_drafts(chances: AcceptanceCalibrator) -> None:
    """Drafts are as long as where no step records kernels; drafts of different lengths record more of them."""
    simulation = Simulation(small, lookup, always(0.9), chances, length=2000)
    runs = [replace(simulation, seed=seed) for seed in range(6)]
    recording, ready = (
        [measure_tokens_per_step(adaptive, replace(run, firsts=firsts)) for run in runs] for firsts in (4, 0)
    )
    assert_mean_at_least([ours / theirs for ours, theirs in zip(recording, ready, strict=True)], 0.9)
