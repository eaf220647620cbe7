"""The adaptive controller in simulated engines, compared with every fixed depth on the same work."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import cast

import pytest

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import DraftOutcome, FixedController
from engine.speculation.drafter import DraftRequest
from tests.engine.speculation.control.costs import (
    adaptive,
    always,
    bound,
    either,
    fixed,
    large,
    lookup,
    model,
    plain,
    small,
)
from tests.engine.speculation.simulation import (
    Branch,
    Simulation,
    boastful,
    honest,
    informed,
    mute,
)
from tests.long import mostly_long
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
    rng = random.Random(shift(seed))
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
    simulation = Simulation(small, lookup, always(0.02), mute, length=50)
    controller = adaptive()
    simulation.step = lambda branches, tokens: 1e-3 + 4e-4 * tokens
    simulation.run(controller, 4000)
    simulation.usual = always(0.9)
    simulation.run(controller, 3000)
    ready = replace(simulation)
    assert simulation.run(controller, 3000) > 0.9 * fixed(ready, 3000) > 1.2 * plain(ready, 3000)
    simulation.usual = always(0.02)
    simulation.run(controller, 500)
    assert simulation.run(controller, 3000) > 0.97 * plain(replace(simulation), 3000)


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
        noise = random.Random(shift(0))
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
        controller.update(outcomes, tokens, 1e-5, seconds * rng.lognormvariate(0, 0.02), False)
        if turn > 1500:
            guesses[others].append(len(draft))
            asked[others] += bool(size[0])
    assert sum(guesses[0]) > 2.5 * len(guesses[0])
    assert sum(guesses[300]) < 0.5 * len(guesses[300])
    assert asked[300] < 0.1 * len(guesses[300])
