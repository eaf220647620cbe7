"""Solutions and step labels of a problem by its suite."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType

from reasoner.evaluation.suites.problem import Problem
from recipes.suites import arithmetic, countdown, words

_SUITES: dict[str, ModuleType] = {"countdown": countdown, "words": words, "arithmetic": arithmetic}


def sample_solution(problem: Problem, rng: random.Random) -> list[str]:
    """Return the steps of a random right solution; the last is the boxed answer."""
    steps: list[str] = _SUITES[problem.suite].sample_solution(problem, rng)
    return steps


def label_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Return for each step True if the attempt is right up to it, by the exact rule of the problem's suite."""
    labels: list[bool] = _SUITES[problem.suite].label_steps(problem, steps)
    return labels
