"""Costs of steps and drafts in simulated engines, and the speeds to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import Controller, FixedController
from tests.engine.speculation.simulation import (
    Simulation,
    best_fixed,
)

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
