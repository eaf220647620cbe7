"""The adaptive controller in simulated engines, compared with every fixed depth on the same work."""

from __future__ import annotations

import gc
import random
import statistics
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import Controller, DraftOutcome, FixedController
from engine.speculation.drafter import DraftRequest
from tests.engine.speculation.simulation import (
    Branch,
    Simulation,
    best_fixed,
    boastful,
    honest,
    informed,
    mute,
)
from tests.long import mostly_long

DEPTH, NODES = 16, 48
FIXED = (1, 2, 3, 4, 6, 8, 12)


def small(branches: int, tokens: int) -> float:
    """Return the step time of a small model: proportional to the tokens, and one token costs as much as two."""
    return 1.2e-3 + 1.2e-4 * max(tokens, 2) + 5e-5 * branches


def large(branches: int, tokens: int) -> float:
    """Return the step time of a large model on a GPU: up to 128 tokens cost as much as one."""
    return 8e-3 + 5e-5 * max(0, tokens - 128) + 2e-5 * branches


def bound(branches: int, tokens: int) -> float:
    """Return a step time proportional to the number of tokens."""
    return 1e-3 * tokens


def lookup(branches: int, depth: int) -> float:
    """Return the drafting time of a table lookup: almost nothing."""
    return 1e-5 + (5e-5 * (1 + branches / 16) if depth else 0)


def model(branches: int, depth: int) -> float:
    """Return the drafting time of a draft model: a third of a small model's step per token."""
    return 2e-5 + (1e-4 + depth * (5e-4 + 3e-5 * branches) if depth else 0)


def always(chance: float) -> Callable[[random.Random], float]:
    return lambda _: chance


def either(rng: random.Random) -> float:
    return rng.choice((0.3, 0.9))


def adaptive() -> AdaptiveController:
    return AdaptiveController(DEPTH, NODES)


def plain(simulation: Simulation, tokens: int) -> float:
    return replace(simulation).run(FixedController(0, 0), tokens)


def fixed(simulation: Simulation, tokens: int) -> float:
    """Return the highest speed of all fixed depths, 0 included."""
    depths: list[Controller] = [FixedController(depth, depth) for depth in (0, *FIXED)]
    return best_fixed(lambda: replace(simulation), depths, tokens)[0]


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


@pytest.mark.parametrize("case", mostly_long(CASES, every=4))
def test_adaptive_depth_is_about_as_fast_as_the_best_fixed_depth(case: str) -> None:
    ratios = []
    for seed in range(3):
        simulation = replace(CASES[case], seed=seed)
        tokens = 4000 + 1000 * simulation.branches
        ours = replace(simulation)
        controller = adaptive()
        ours.run(controller, tokens // 2)
        ratios.append(ours.run(controller, tokens) / fixed(simulation, tokens))
    assert statistics.mean(ratios) > 0.94


@pytest.mark.parametrize(
    "simulation",
    [
        Simulation(small, model, always(0.2), honest),
        Simulation(small, model, always(0.3), boastful),
        Simulation(small, model, always(0.1), mute, branches=8),
        Simulation(bound, lookup, always(0.8), honest, branches=4),
        Simulation(bound, model, always(0.7), honest, branches=64),
    ],
    ids=["few are right", "few are right, many are said to be", "eight", "bound by arithmetic", "sixty-four"],
)
def test_drafting_that_costs_more_than_it_saves_stops_without_loss_of_speed(simulation: Simulation) -> None:
    tokens = 2000 * simulation.branches
    shares, ratios = [], []
    for seed in range(3):
        ours = replace(simulation, seed=seed)
        controller = adaptive()
        ours.run(controller, tokens // 2)
        learned = len(ours.sizes)
        ratios.append(ours.run(controller, tokens) / plain(replace(simulation, seed=seed), tokens))
        guesses = ours.sizes[learned:]
        shares.append(sum(guesses) / len(guesses) / simulation.branches)
    assert statistics.mean(ratios) > 0.98
    assert 0 < statistics.mean(shares) < 0.1


@pytest.mark.parametrize("seed", range(12))
def test_adaptive_depth_is_never_slower_than_plain_decoding_in_the_long_run(seed: int) -> None:
    """For any costs, acceptance rates and estimates of the drafter, from the first step on."""
    rng = random.Random(seed)
    base, token, branch, knee = (
        rng.choice(values) for values in ((1e-3, 1e-2), (2e-5, 2e-4, 1e-3), (0, 1e-4), (1, 32))
    )
    start, each, few = (rng.choice(values) for values in ((1e-5, 1e-3), (1e-5, 5e-4, 3e-3), (0, 1e-4)))
    simulation = Simulation(
        lambda branches, tokens: base + token * max(knee, tokens) + branch * branches,
        lambda branches, depth: start + depth * (each + few * branches) if depth else 1e-5,
        rng.choice((always(0.05), always(0.5), always(0.7), either)),
        rng.choice((honest, mute, informed, boastful)),
        offers=rng.choice((0.2, 1.0)),
        branches=rng.choice((1, 2, 5)),
        length=rng.choice((20, 300)),
        noise=rng.choice((0.02, 0.1)),
        seed=seed,
    )
    tokens = 4000 * simulation.branches
    assert replace(simulation).run(adaptive(), tokens) > 0.97 * plain(simulation, tokens)


def test_drafting_starts_and_stops_with_changes_of_the_acceptance_rate() -> None:
    started, stopped = [], []
    for seed in range(4):
        simulation = Simulation(small, lookup, always(0.02), mute, length=50, seed=seed)
        controller = adaptive()
        simulation.step = lambda branches, tokens: 1e-3 + 4e-4 * tokens
        simulation.run(controller, 4000)
        simulation.usual = always(0.9)
        simulation.run(controller, 3000)
        ready = replace(simulation)
        speed, best = simulation.run(controller, 3000), fixed(ready, 3000)
        assert best > 1.33 * plain(ready, 3000)
        started.append(speed / best)
        simulation.usual = always(0.02)
        simulation.run(controller, 500)
        stopped.append(simulation.run(controller, 3000) / plain(replace(simulation), 3000))
    assert statistics.mean(started) > 0.9
    assert statistics.mean(stopped) > 0.97


def test_drafting_adapts_to_the_batch_size() -> None:
    """Eight branches are compute-bound, one is not; after each change the speed is soon near the optimum."""
    simulation = Simulation(lambda _, tokens: max(4e-3, 1e-3 * tokens), lookup, always(0.8), informed)
    controller = adaptive()
    for branches in (1, 8, 1, 8):
        simulation.branches = branches
        simulation.run(controller, 1000 * branches)
        best = fixed(replace(simulation), 2000 * branches)
        assert simulation.run(controller, 2000 * branches) > 0.93 * best


@pytest.mark.parametrize("right", [0.6, 0.8, 0.9])
def test_a_depth_measured_for_few_branches_is_tried_before_it_is_used_for_many(right: float) -> None:
    """A large model on two cores, where reading the weights takes as long as computing ten tokens."""
    ratios = []
    for seed in range(5):
        simulation = Simulation(
            lambda _, tokens: max(24e-3, 8e-3 + 1.55e-3 * tokens), lookup, always(right), noise=0.02, seed=seed
        )
        controller = adaptive()
        for simulation.branches in (1, 4):
            simulation.run(controller, 500 * simulation.branches)
        simulation.branches = 16
        before = replace(simulation)
        ratios.append(simulation.run(controller, 16 * 384) / plain(before, 16 * 384))
    assert statistics.mean(ratios) > 0.98


def test_a_slower_machine_changes_decisions_only_briefly() -> None:
    simulation = Simulation(small, model, always(0.9), informed)
    controller = adaptive()
    simulation.run(controller, 6000)
    usual = simulation.run(controller, 4000)
    simulation.step = lambda branches, tokens: 3 * small(branches, tokens)
    simulation.draft = lambda branches, depth: 3 * model(branches, depth)
    simulation.run(controller, 400)
    assert 3 * simulation.run(controller, 4000) == pytest.approx(usual, rel=0.07)


def test_plain_steps_are_timed_among_other_plain_steps() -> None:
    """A plain step after a drafted one costs more, so comparing these would overestimate the gain of drafting."""

    class Machine:
        cold = False

        def __call__(self, branches: int, tokens: int) -> float:
            cold, self.cold = self.cold, tokens > branches
            return 2e-3 if self.cold else 1.6e-3 if cold else 1e-3

    def simulation() -> Simulation:
        return Simulation(Machine(), lambda _branches, _depth: 1e-5, always(0.45))

    ours, controller = simulation(), adaptive()
    ours.run(controller, 4000)
    assert ours.run(controller, 20_000) > 0.97 * plain(simulation(), 20_000)


def test_interrupted_steps_are_ignored_as_outliers() -> None:
    """One step in eight takes ten times as long, with or without drafts."""

    def simulation() -> Simulation:
        noise = random.Random(0)
        interrupted = lambda branches, tokens: small(branches, tokens) * (10 if noise.random() < 0.125 else 1)  # noqa: E731
        return Simulation(interrupted, lookup, always(0.8))

    ours, controller = simulation(), adaptive()
    ours.run(controller, 2000)
    assert ours.run(controller, 8000) > 0.9 * fixed(replace(simulation()), 8000)


def test_slow_first_steps_of_a_size_are_discarded() -> None:
    """The first three steps of a size that has not been computed recently cost three times as much."""

    class Machine:
        steps = 0

        def __init__(self) -> None:
            self.seen: dict[int, tuple[int, int]] = {}

        def __call__(self, branches: int, tokens: int) -> float:
            self.steps += 1
            last, again = self.seen.get(tokens, (-100, 0))
            again = again + 1 if self.steps - last <= 30 else 1
            self.seen[tokens] = self.steps, again
            return small(branches, tokens) * (3 if tokens > branches and again <= 3 else 1)

    def simulation() -> Simulation:
        return Simulation(Machine(), lambda _branches, depth: 3e-4 if depth else 1e-5, always(0.7), length=2000)

    ours, controller = simulation(), adaptive()
    ours.run(controller, 8000)
    best = max(simulation().run(FixedController(depth, depth), 8000) for depth in (2, 3, 4, 6))
    assert ours.run(controller, 8000) > 0.93 * best > 1.7 * simulation().run(FixedController(0, 0), 8000)


def test_steps_that_record_kernels_do_not_count_as_cost_of_drafts() -> None:
    for chances in (honest, informed):
        simulation = Simulation(small, lookup, always(0.9), chances, length=2000, firsts=4)
        ratios = []
        for seed in range(5):
            ours, plain = replace(simulation, seed=seed), replace(simulation, seed=seed)
            ratios.append(ours.run(adaptive(), 1000) / plain.run(FixedController(0, 0), 1000))
        assert statistics.median(ratios) > 1.5


def test_idle_compute_is_used_for_trees() -> None:
    simulation = Simulation(large, lookup, always(0.5), siblings=3)
    chains = fixed(replace(simulation, siblings=1), 4000)
    ours = replace(simulation)
    controller = adaptive()
    ours.run(controller, 2000)
    assert ours.run(controller, 4000) > 1.15 * chains


def test_a_step_with_a_prompt_has_drafts_only_if_they_are_cheaper_there() -> None:
    """Alone, the branch computes 4 tokens in the time of one; beside a prompt each token costs half of that time."""
    rng, controller = random.Random(0), adaptive()
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
        controller.update(outcomes, tokens, 1e-5, seconds * rng.lognormvariate(0, 0.02), False)
        if turn > 1500:
            guesses[others].append(len(draft))
            asked[others] += bool(size[0])
    assert sum(guesses[0]) > 2.5 * len(guesses[0])
    assert sum(guesses[300]) < 0.5 * len(guesses[300])
    assert asked[300] < 0.1 * len(guesses[300])


def test_the_same_steps_lead_to_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(small, model, either, informed, branches=3)
        simulation.run(adaptive(), 3000)
        runs.append(simulation.sizes)
    assert runs[0] == runs[1]


def test_trials_stay_within_their_budget_from_the_first_step_on() -> None:
    """If no draft token is accepted, the first hundred steps lose no more than the budget of trials."""
    for branches, step in ((1, small), (4, small), (64, bound)):
        asked = 100 * branches
        ratios = [
            replace(simulation).run(adaptive(), asked) / plain(simulation, asked)
            for seed in range(5)
            for simulation in [
                Simulation(step, lookup, always(0.01), boastful, branches=branches, noise=0.01, seed=seed)
            ]
        ]
        assert statistics.median(ratios) > 0.92


def test_trials_without_gain_become_rarer() -> None:
    for branches in (1, 4, 16):
        simulation = Simulation(small, model, always(0.2), honest, branches=branches)
        controller = adaptive()
        shares = []
        for steps in (500, 12_000):
            before = len(simulation.sizes)
            simulation.run(controller, steps * branches)
            shares.append(sum(guesses > 0 for guesses in simulation.sizes[before:]) / steps)
        assert shares[0] > 3 * shares[1] > 0
        ready = replace(simulation)
        assert simulation.run(controller, 5000 * branches) > 0.995 * plain(ready, 5000 * branches)


def test_shortened_skipping_does_not_change_the_interval_between_trials() -> None:
    """The interval between trials does not depend on how soon arriving and finishing branches end skipping."""

    def trials(allowed: int) -> list[int]:
        controller, branch = adaptive(), cast(GenerateSequence, Branch(0.5, 1 << 30, random.Random(0)))
        begun, steps, rested, guessed = [], 0, 0, False
        while len(begun) < 5:
            [(depth, _)] = controller.choose_sizes([branch], 0, rested)
            if depth and not guessed:
                begun.append(steps)
            guessed = depth > 0
            rested = min(controller.update([], 1 + depth, 1e-5, 1e-3 * (1 + depth), False), allowed)
            steps += 1 + rested
        return begun

    assert trials(63) == trials(3) == trials(0)


def test_a_gain_after_an_expensive_start_is_found() -> None:
    """A drafter that was idle for long catches up first, which takes as long as about ten plain steps."""
    for branches, missing in ((1, 1e-5), (4, 5e-6)):
        ratios = []
        for seed in range(3):
            simulation = Simulation(
                lambda branches, tokens: 1e-4 + 1e-5 * branches + 1.1e-5 * tokens,
                lambda branches, depth: 1e-5 + (6e-5 + depth * (1.2e-5 + 6e-6 * branches) if depth else 0),
                always(0.85),
                informed,
                missing=missing,
                branches=branches,
                seed=seed,
            )
            ours, controller, tokens = replace(simulation), adaptive(), 3000 * branches
            ours.run(controller, tokens // 2)
            speed = ours.run(controller, tokens)
            ratios.append(speed / fixed(simulation, tokens))
            assert speed > 1.03 * plain(simulation, tokens)
        assert statistics.mean(ratios) > 0.95


@pytest.mark.long
def test_adaptive_depth_matches_the_best_fixed_depth_on_a_noisy_machine() -> None:
    """Step times vary by a fifth from step to step."""
    for branches, step in ((1, small), (4, small), (4, large)):
        ratios = []
        for seed in range(4):
            simulation = Simulation(step, lookup, always(0.85), informed, branches=branches, noise=0.2, seed=seed)
            ours, controller, tokens = replace(simulation), adaptive(), 4000 * branches
            ours.run(controller, tokens // 2)
            ratios.append(ours.run(controller, tokens) / fixed(simulation, tokens))
        assert statistics.mean(ratios) > 0.95


def test_the_last_branch_gets_drafts_within_some_dozens_of_steps() -> None:
    """Drafts slow 64 branches down and speed one up; all branches but one end."""
    simulation = Simulation(lambda _, tokens: max(8e-3, 1e-3 * tokens), lookup, always(0.8), branches=64, length=4000)
    controller = adaptive()
    simulation.run(controller, 64 * 400)
    assert simulation.run(controller, 64 * 400) > 0.97 * plain(replace(simulation), 64 * 400)
    del simulation.running[1:]
    simulation.branches = 1
    simulation.run(controller, 60)
    assert simulation.run(controller, 300) > 2 * plain(replace(simulation), 300)


def test_long_chains_are_soon_requested_at_a_high_acceptance_rate() -> None:
    """As for a distilled draft model: no hundreds of steps are spent on each depth in between."""

    def chain(branches: int, depth: int) -> float:
        return 5e-5 + 1e-5 * depth if depth else 0

    ratios = []
    for seed in range(5):
        ours = Simulation(lambda _, tokens: 4e-4 + 3e-5 * tokens, chain, always(0.9), informed, seed=seed)
        theirs = replace(ours)
        ratios.append(ours.run(AdaptiveController(8, 24), 600) / theirs.run(FixedController(8, 8), 600))
    assert statistics.median(ratios) > 0.9


def test_the_controller_keeps_little_state_per_load_and_none_per_branch() -> None:
    controller, gone = adaptive(), []
    rng = random.Random(0)
    for number in range(512):
        branches = [cast(GenerateSequence, Branch(0.5, 1, rng)) for _ in range(1 + number % 256)]
        gone += [weakref.ref(branch) for branch in branches]
        controller.choose_sizes(branches, 0, 0)
        controller.trim(
            [DraftRequest(branch, 2, 2) for branch in branches], [Draft.chain([1, 2], [0.5, 0.5])] * len(branches)
        )
        controller.update([], len(branches), 1e-4, 1e-3, False)
    del branches
    gc.collect()
    assert not any(one() for one in gone)
    sizes = {name: len(value) for name, value in vars(controller).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) <= 256


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_trimmed_draft_is_a_subtree_of_the_proposal(data: st.DataObject) -> None:
    controller = adaptive()
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
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
        controller.update(outcomes, tokens, 1e-5, 1e-3 + 1e-5 * tokens, False)


def _random_tree(rng: random.Random, wish: DraftRequest) -> Draft:
    """Return a tree of distinct tokens, each after a random earlier one or the root."""
    parents: list[int] = []
    depths: list[int] = []
    for index in range(rng.randint(0, wish.nodes)):
        able = [-1, *(place for place, depth in enumerate(depths) if depth < wish.depth)]
        parents.append(able[-1] if wish.nodes == wish.depth else rng.choice(able))
        depths.append(1 + (depths[parents[index]] if parents[index] >= 0 else 0))
    return Draft(tuple(range(len(parents))), tuple(parents), tuple(rng.random() for _ in parents))
