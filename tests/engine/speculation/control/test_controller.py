"""The adaptive controller in simulated engines, compared with every fixed depth on the same work."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import cast

import pytest

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import DraftOutcome, StepCost
from engine.speculation.drafter import DraftRequest
from tests.engine.speculation.control.costs import adaptive, always, either, fixed, large, lookup, model, small
from tests.engine.speculation.control.measures import (
    COSTLY,
    make_any_costs,
    measure_batch_sizes,
    measure_changes,
    measure_costly_drafts,
    measure_many_after_few,
    measure_share_of_plain,
    measure_share_of_the_best,
)
from tests.engine.speculation.simulation import Branch, Simulation, boastful, informed, mute
from tests.long import mostly_long
from tests.means import assert_mean_at_least, assert_mean_at_most
from tests.seeds import shift

CASES = {
    "alone, free guesses of one quality": Simulation(small, lookup, always(0.8)),
    "alone, a drafter that says nothing": Simulation(small, lookup, always(0.6), mute),
    "alone, a drafter that knows": Simulation(small, lookup, always(0.9), informed),
    "alone, a drafter that exaggerates": Simulation(small, lookup, always(0.6), boastful),
    "alone, guesses that cost": Simulation(small, model, always(0.9)),
    "alone, guesses that cost, known": Simulation(small, model, always(0.9), informed),
    "alone, seldom any guess": Simulation(small, lookup, always(0.8), offers=0.3),
    "four, branches of two kinds": Simulation(small, lookup, either, mute, branches=4),
    "four, a large model": Simulation(large, model, always(0.8), boastful, branches=4),
    "sixteen": Simulation(small, lookup, always(0.8), informed, branches=16),
    "sixteen, branches of two kinds": Simulation(small, model, either, informed, branches=16),
    "sixteen, a large model": Simulation(large, model, either, branches=16),
}


@pytest.mark.parametrize("case", mostly_long(CASES, every=6))
def test_adaptive_depth_is_about_as_fast_as_the_best_fixed_depth(case: str) -> None:
    shares = [measure_share_of_the_best(adaptive, replace(CASES[case], seed=seed)) for seed in range(6)]
    assert_mean_at_least(shares, 0.94)


@pytest.mark.parametrize("case", COSTLY)
def test_drafting_that_costs_more_than_it_saves_stops_without_loss_of_speed(case: str) -> None:
    runs = [measure_costly_drafts(adaptive, replace(COSTLY[case], seed=seed)) for seed in range(6)]
    speeds, drafted = zip(*runs, strict=True)
    assert_mean_at_least(speeds, 0.98)
    assert_mean_at_most(drafted, 0.1)
    assert max(drafted) > 0


@pytest.mark.parametrize("case", mostly_long(range(12), every=6))
def test_adaptive_depth_is_never_slower_than_plain_decoding_in_the_long_run(case: int) -> None:
    """For any costs, acceptance rates and estimates of the drafter, from the first step on: trials are paid back."""
    simulation = make_any_costs(case)
    shares = [measure_share_of_plain(adaptive, replace(simulation, seed=seed), 4000) for seed in range(6)]
    assert_mean_at_least(shares, 0.97)


def test_drafting_starts_and_stops_with_changes_of_the_acceptance_rate() -> None:
    started, gain, stopped = zip(*(measure_changes(adaptive, seed) for seed in range(6)), strict=True)
    assert_mean_at_least(started, 0.9)
    assert_mean_at_least(gain, 1.2)
    assert_mean_at_least(stopped, 0.97)


def test_drafting_adapts_to_the_batch_size() -> None:
    """Eight branches are compute-bound, one is not; after each change the speed is soon near the optimum."""
    for shares in zip(*(measure_batch_sizes(adaptive, seed) for seed in range(6)), strict=True):
        assert_mean_at_least(shares, 0.93)


@pytest.mark.parametrize("right", [0.6, 0.8, 0.9])
def test_a_depth_measured_for_few_branches_is_tried_before_it_is_used_for_many(right: float) -> None:
    """A large model on two cores, where reading the weights takes as long as computing ten tokens."""
    assert_mean_at_least([measure_many_after_few(adaptive, right, seed) for seed in range(6)], 0.98)


def test_idle_compute_is_used_for_trees() -> None:
    gains = []
    for seed in range(6):
        ours, controller = Simulation(large, lookup, always(0.5), siblings=3, seed=seed), adaptive()
        chains = fixed(replace(ours, siblings=1), 2000)
        ours.run(controller, 2000)
        gains.append(ours.run(controller, 2000) / chains)
    assert_mean_at_least(gains, 1.15)


def test_a_step_with_a_prompt_has_drafts_only_if_they_are_cheaper_there() -> None:
    """Alone, the branch computes 4 tokens in the time of one; beside a prompt each token costs half of that time."""
    rng, controller = random.Random(shift(0)), adaptive()
    branch = cast(GenerateSequence, Branch(0.8, 1 << 30, rng))
    guesses: dict[int, list[int]] = {0: [], 300: []}
    asked: dict[int, int] = {0: 0, 300: 0}
    for turn in range(3000):
        others = 300 if turn % 5 == 0 else 0
        [size] = controller.choose_sizes([branch], others, 0)
        draft = Draft.chain([0] * size[0], [0.8] * size[0])
        if size[0]:
            [draft] = controller.trim([DraftRequest(branch, *size)], [draft])
        right = next((place for place in range(len(draft)) if rng.random() > 0.8), len(draft))
        outcomes = [DraftOutcome(branch, draft, tuple(range(right)))] if draft else []
        tokens = 1 + others + len(draft)
        seconds = 4e-3 if tokens <= 4 else 2e-3 * tokens
        controller.update(outcomes, StepCost(tokens, 1e-5, seconds * rng.lognormvariate(0, 0.02)))
        if turn > 1500:
            guesses[others].append(len(draft))
            asked[others] += bool(size[0])
    assert sum(guesses[0]) > 2.5 * len(guesses[0])
    assert sum(guesses[300]) < 0.5 * len(guesses[300])
    assert asked[300] < 0.1 * len(guesses[300])
