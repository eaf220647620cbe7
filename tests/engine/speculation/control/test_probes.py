"""Probes of the adaptive controller in simulated engines: their cost, their timing, and what they find."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import DraftOutcome, FixedController, StepCost
from engine.speculation.drafter import DraftRequest
from tests.engine.speculation.control.costs import (
    DEPTH,
    NODES,
    adaptive,
    always,
    bound,
    either,
    fixed,
    large,
    lookup,
    model,
    small,
)
from tests.engine.speculation.control.measures import (
    measure_gain_after_an_expensive_start,
    measure_share_of_plain,
    measure_the_last_branch,
    measure_trials_without_gain,
)
from tests.engine.speculation.simulation import (
    Branch,
    Simulation,
    boastful,
    informed,
)
from tests.long import mostly_long
from tests.means import assert_mean_at_least
from tests.seeds import shift


def test_the_same_steps_lead_to_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(small, model, either, informed, branches=3)
        simulation.run(adaptive(), 3000)
        runs.append(simulation.sizes)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("branches", "step"), [(1, small), (4, small), (64, bound)])
def test_trials_stay_within_their_budget_from_the_first_step_on(
    branches: int, step: Callable[[int, int], float]
) -> None:
    """If no draft token is accepted, the first hundred steps lose no more than the budget of trials."""
    simulation = Simulation(step, lookup, always(0.01), boastful, branches=branches, noise=0.01)
    shares = [measure_share_of_plain(adaptive, replace(simulation, seed=seed), 100) for seed in range(6)]
    assert_mean_at_least(shares, 0.92)


@pytest.mark.parametrize("branches", mostly_long((1, 4, 16), every=2))
def test_trials_without_gain_become_rarer(branches: int) -> None:
    runs = [measure_trials_without_gain(adaptive, branches, seed) for seed in range(6)]
    assert_mean_at_least([one.early - 3 * one.late for one in runs], 0)
    assert_mean_at_least([one.speed for one in runs], 0.995)
    assert all(one.late > 0 for one in runs)


def test_shortened_skipping_does_not_change_the_interval_between_trials() -> None:
    """The interval between trials does not depend on how soon arriving and finishing branches end skipping."""

    def trials(allowed: int) -> list[int]:
        controller, branch = adaptive(), cast(GenerateSequence, Branch(0.5, 1 << 30, random.Random(shift(0))))
        begun, steps, rested, guessed = [], 0, 0, False
        while len(begun) < 5:
            [(depth, _)] = controller.choose_sizes([branch], 0, rested)
            if depth and not guessed:
                begun.append(steps)
            guessed = depth > 0
            rested = min(controller.update([], StepCost(1 + depth, 1e-5, 1e-3 * (1 + depth))), allowed)
            steps += 1 + rested
        return begun

    assert trials(63) == trials(3) == trials(0)


@pytest.mark.parametrize(("branches", "missing"), [(1, 1e-5), (4, 5e-6)])
def test_a_gain_after_an_expensive_start_is_found(branches: int, missing: float) -> None:
    """A drafter that was idle for long catches up first, which takes as long as about ten plain steps."""
    runs = [measure_gain_after_an_expensive_start(adaptive, branches, missing, seed) for seed in range(6)]
    of_best, of_plain = zip(*runs, strict=True)
    assert_mean_at_least(of_best, 0.97)
    assert_mean_at_least(of_plain, 1.03)


@pytest.mark.long
def test_adaptive_depth_matches_the_best_fixed_depth_on_a_noisy_machine() -> None:
    """Step times vary by a fifth from step to step."""
    for branches, step in ((1, small), (4, small), (4, large)):
        ratios = []
        for seed in range(6):
            simulation = Simulation(step, lookup, always(0.85), informed, branches=branches, noise=0.2, seed=seed)
            ours, controller, tokens = replace(simulation), adaptive(), 4000 * branches
            ours.run(controller, tokens // 2)
            ratios.append(ours.run(controller, tokens) / fixed(simulation, tokens))
        assert_mean_at_least(ratios, 0.97)


def test_the_last_branch_gets_drafts_within_some_dozens_of_steps() -> None:
    """Drafts slow 64 branches down and speed one up; all branches but one end."""
    many, last = zip(*(measure_the_last_branch(adaptive, seed) for seed in range(6)), strict=True)
    assert_mean_at_least(many, 0.97)
    assert_mean_at_least(last, 2)


def test_long_chains_are_soon_requested_at_a_high_acceptance_rate() -> None:
    """As for a distilled draft model: no hundreds of steps are spent on each depth in between."""

    def chain(branches: int, depth: int) -> float:
        return 5e-5 + 1e-5 * depth if depth else 0

    ratios = []
    for seed in range(8):
        ours = Simulation(lambda _, tokens: 4e-4 + 3e-5 * tokens, chain, always(0.9), informed, seed=seed)
        theirs = replace(ours)
        ratios.append(ours.run(AdaptiveController(8, 24), 600) / theirs.run(FixedController(8, 8), 600))
    assert_mean_at_least(ratios, 0.9)


def test_the_controller_keeps_little_state_per_load_and_none_per_branch() -> None:
    controller, gone = adaptive(), []
    rng = random.Random(shift(0))
    for number in range(512):
        branches = [cast(GenerateSequence, Branch(0.5, 1, rng)) for _ in range(1 + number % 256)]
        gone += [weakref.ref(branch) for branch in branches]
        controller.choose_sizes(branches, 0, 0)
        controller.trim(
            [DraftRequest(branch, 2, 2) for branch in branches], [Draft.chain([1, 2], [0.5, 0.5])] * len(branches)
        )
        controller.update([], StepCost(len(branches), 1e-4, 1e-3))
    del branches
    gc.collect()
    assert not any(one() for one in gone)
    sizes = {name: len(value) for name, value in vars(controller).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) <= 256


@given(st.data())
def test_a_trimmed_draft_is_a_subtree_of_the_proposal(data: st.DataObject) -> None:
    controller = adaptive()
    rng = random.Random(shift(data.draw(st.integers(0, 1 << 20))))
    branches = [cast(GenerateSequence, Branch(0.5, 1 << 30, rng)) for _ in range(data.draw(st.integers(1, 5)))]
    for _ in range(40):
        sizes = controller.choose_sizes(branches, rng.choice((0, 0, 100)), 0)
        assert all(0 <= depth <= DEPTH and depth <= nodes <= NODES for depth, nodes in sizes)
        wishes = [DraftRequest(branch, *size) for branch, size in zip(branches, sizes, strict=True) if size[0]]
        drafts = [_random_tree(rng, wish) for wish in wishes]
        kept = controller.trim(wishes, drafts) if wishes else []
        assert len(kept) == len(drafts)
        for part, whole in zip(kept, drafts, strict=True):
            ways = {tuple(whole.path(index)) for index in range(len(whole))}
            assert all(tuple(part.path(index)) in ways for index in range(len(part)))
            assert all(parent < index for index, parent in enumerate(part.parents))
        outcomes = [DraftOutcome(wish.sequence, draft, ()) for wish, draft in zip(wishes, kept, strict=True) if draft]
        tokens = len(branches) + sum(map(len, kept))
        controller.update(outcomes, StepCost(tokens, 1e-5, 1e-3 + 1e-5 * tokens))


def _random_tree(rng: random.Random, wish: DraftRequest) -> Draft:
    """Return a tree of distinct tokens, each after a random earlier one or the root."""
    parents: list[int] = []
    depths: list[int] = []
    for index in range(rng.randint(0, wish.nodes)):
        able = [-1, *(place for place, depth in enumerate(depths) if depth < wish.depth)]
        parents.append(able[-1] if wish.nodes == wish.depth else rng.choice(able))
        depths.append(1 + (depths[parents[index]] if parents[index] >= 0 else 0))
    return Draft(tuple(range(len(parents))), tuple(parents), tuple(rng.random() for _ in parents))
