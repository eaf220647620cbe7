"""Speeds of controllers in simulated engines, as shares of others on the same work."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.speculation.control.controller import Controller
from tests.engine.speculation.control.costs import always, bound, either, fixed, lookup, model, plain, small
from tests.engine.speculation.simulation import Simulation, boastful, honest, informed, mute
from tests.seeds import shift

MakeController = Callable[[], Controller]


COSTLY = {
    "few are right": Simulation(small, model, always(0.2), honest),
    "few are right, many are said to be": Simulation(small, model, always(0.3), boastful),
    "eight": Simulation(small, model, always(0.1), mute, branches=8),
    "bound by arithmetic": Simulation(bound, lookup, always(0.8), honest, branches=4),
    "sixty-four": Simulation(bound, model, always(0.7), honest, branches=64),
}


def measure_share_of_the_best(make: MakeController, simulation: Simulation) -> float:
    """Return the speed of a controller that has learned, as a share of that of the best fixed depth."""
    tokens = 2000 + 500 * simulation.branches
    ours, controller = replace(simulation), make()
    ours.run(controller, tokens)
    return ours.run(controller, tokens) / fixed(simulation, tokens)


def measure_costly_drafts(make: MakeController, simulation: Simulation) -> tuple[float, float]:
    """Return the speed as a share of plain decoding's, and the draft tokens per branch and step."""
    tokens = 1500 * simulation.branches
    ours, controller = replace(simulation), make()
    ours.run(controller, tokens // 2)
    learned = len(ours.sizes)
    share = ours.run(controller, tokens) / plain(simulation, tokens)
    return share, statistics.mean(ours.sizes[learned:]) / simulation.branches


def make_any_costs(seed: int) -> Simulation:
    """Return a simulation with any costs, acceptance rates and estimates of the drafter."""
    rng = random.Random(shift(seed))
    base, token, branch, knee = (
        rng.choice(values) for values in ((1e-3, 1e-2), (2e-5, 2e-4, 1e-3), (0, 1e-4), (1, 32))
    )
    start, each, few = (rng.choice(values) for values in ((1e-5, 1e-3), (1e-5, 5e-4, 3e-3), (0, 1e-4)))
    return Simulation(
        lambda branches, tokens: base + token * max(knee, tokens) + branch * branches,
        lambda branches, depth: start + depth * (each + few * branches) if depth else 1e-5,
        rng.choice((always(0.05), always(0.5), always(0.7), either)),
        rng.choice((honest, mute, informed, boastful)),
        offers=rng.choice((0.2, 1.0)),
        branches=rng.choice((1, 2, 5)),
        length=rng.choice((20, 300)),
        noise=rng.choice((0.02, 0.1)),
    )


def measure_share_of_plain(make: MakeController, simulation: Simulation, tokens: int) -> float:
    """Return the speed from the first step on as a share of plain decoding's."""
    tokens *= simulation.branches
    return replace(simulation).run(make(), tokens) / plain(simulation, tokens)


class Change(NamedTuple):
    """Speeds as shares of others."""

    started: float
    """Share of the best fixed depth's, after drafting began to pay."""
    gain: float
    """Speed of the best fixed depth there, as a share of plain decoding's."""
    stopped: float
    """Share of plain decoding's, after drafting ceased to pay."""


def measure_changes(make: MakeController, seed: int) -> Change:
    simulation, controller = Simulation(small, lookup, always(0.02), mute, length=50, seed=seed), make()
    simulation.step = lambda branches, tokens: 1e-3 + 4e-4 * tokens
    simulation.run(controller, 4000)
    simulation.usual = always(0.9)
    # No trial is farther from the last one than twice the time before that.
    simulation.run(controller, 8000)
    ready = replace(simulation)
    best, usual = fixed(ready, 1500), plain(ready, 1500)
    started = simulation.run(controller, 1500) / best
    simulation.usual = always(0.02)
    simulation.run(controller, 500)
    ready = replace(simulation)
    return Change(started, best / usual, simulation.run(controller, 3000) / plain(ready, 3000))


def measure_batch_sizes(make: MakeController, seed: int) -> list[float]:
    """Return the shares of the best fixed depth's speed after each change of the number of branches."""
    simulation = Simulation(lambda _, tokens: max(4e-3, 1e-3 * tokens), lookup, always(0.8), informed, seed=seed)
    controller, shares = make(), []
    for simulation.branches in (1, 8, 1):
        simulation.run(controller, 1000 * simulation.branches)
        best = fixed(replace(simulation), 500 * simulation.branches)
        shares.append(simulation.run(controller, 500 * simulation.branches) / best)
    return shares


def measure_many_after_few(make: MakeController, right: float, seed: int) -> float:
    """Return the speed of 16 branches, as a share of plain decoding's, after one and four."""
    simulation = Simulation(
        lambda _, tokens: max(24e-3, 8e-3 + 1.55e-3 * tokens), lookup, always(right), noise=0.02, seed=seed
    )
    controller = make()
    for simulation.branches in (1, 4):
        simulation.run(controller, 500 * simulation.branches)
    simulation.branches = 16
    before = replace(simulation)
    return simulation.run(controller, 16 * 384) / plain(before, 16 * 384)


def measure_tokens_per_step(make: MakeController, simulation: Simulation) -> float:
    ours = replace(simulation)
    ours.run(make(), 1000)
    return ours.tokens / len(ours.sizes)


class Trials(NamedTuple):
    """Shares of steps with trials, and the speed."""

    early: float
    late: float
    speed: float
    """Afterwards, as a share of plain decoding's."""


def measure_trials_without_gain(make: MakeController, branches: int, seed: int) -> Trials:
    simulation = Simulation(small, model, always(0.2), honest, branches=branches, seed=seed)
    controller, shares = make(), []
    for steps in (500, 8000):
        before = len(simulation.sizes)
        simulation.run(controller, steps * branches)
        shares.append(statistics.mean(guesses > 0 for guesses in simulation.sizes[before:]))
    ready = replace(simulation)
    speed = simulation.run(controller, 3000 * branches) / plain(ready, 3000 * branches)
    return Trials(early=shares[0], late=shares[1], speed=speed)


def measure_the_last_branch(make: MakeController, seed: int) -> tuple[float, float]:
    """Return the speed of 64 branches, which drafts slow down, and of the last one, soon after: shares of plain
    decoding's.
    """
    step = lambda _, tokens: max(8e-3, 1e-3 * tokens)  # noqa: E731
    simulation = Simulation(step, lookup, always(0.8), branches=64, length=4000, seed=seed)
    controller = make()
    simulation.run(controller, 64 * 200)
    many = simulation.run(controller, 64 * 200) / plain(replace(simulation), 64 * 200)
    del simulation.running[1:]
    simulation.branches = 1
    simulation.run(controller, 60)
    return many, simulation.run(controller, 300) / plain(replace(simulation), 300)


def measure_gain_after_an_expensive_start(
    make: MakeController, branches: int, missing: float, seed: int
) -> tuple[float, float]:
    """Return the speed as shares of the best fixed depth's and of plain decoding's."""
    simulation = Simulation(
        lambda branches, tokens: 1e-4 + 1e-5 * branches + 1.1e-5 * tokens,
        lambda branches, depth: 1e-5 + (6e-5 + depth * (1.2e-5 + 6e-6 * branches) if depth else 0),
        always(0.85),
        informed,
        missing=missing,
        branches=branches,
        seed=seed,
    )
    ours, controller, tokens = replace(simulation), make(), 1000 * branches
    ours.run(controller, tokens)
    speed = ours.run(controller, tokens)
    return speed / fixed(simulation, tokens), speed / plain(simulation, tokens)
