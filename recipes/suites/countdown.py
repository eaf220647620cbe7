"""Attempts at Countdown problems, with exact labels of their steps and the odds of random moves."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from reasoner.evaluation.suites.countdown import State, after, can_reach, check, good_moves, moves
from reasoner.evaluation.suites.problem import Problem
from recipes.suites.steps import boxed

STEP = re.compile(r"(\d{1,4}) ([+\-*/]) (\d{1,4}) = (\d{1,4}), left (\d{1,4}(?: \d{1,4})*)")
_ODDS: dict[State, dict[int, float]] = {}
LARGEST_REMEMBERED = 4
"""Maximum number of numbers in a state whose odds are memoised; larger states rarely recur."""


def odds(numbers: Sequence[int], target: int) -> float:
    """Return the probability that uniformly random legal moves end at the target."""
    return _odds(tuple(sorted(numbers))).get(target, 0.0)


def _odds(state: State) -> dict[int, float]:
    if len(state) == 1:
        return {state[0]: 1.0}
    known = _ODDS.get(state)
    if known is None:
        known = {}
        choices = [tuple(sorted(after(state, a, b, result))) for a, _, b, result in moves(state)]
        for choice in choices:
            for value, chance in _odds(choice).items():
                known[value] = known.get(value, 0.0) + chance / len(choices)
        if len(state) <= LARGEST_REMEMBERED:
            _ODDS[state] = known
    return known


def sample_solution(problem: Problem, rng: random.Random) -> list[str]:
    """Return the steps of a solution, sampled uniformly from the moves that keep the target reachable."""
    return walk(problem, rng, stray=0.0)


def walk(problem: Problem, rng: random.Random, *, stray: float, given: Sequence[str] = ()) -> list[str]:
    """Return the steps of an attempt that takes any legal move with probability ``stray`` at each step.

    It starts with the given steps, which must be legal.
    """
    numbers: list[int] = problem.data["numbers"]
    target: int = problem.data["target"]
    expressions = [(number, str(number)) for number in numbers]
    steps: list[str] = []
    while len(numbers) > 1:
        options = list(moves(numbers))
        if len(steps) < len(given):
            options = [move for move in options if given[len(steps)].startswith("{} {} {} = {},".format(*move))]
        elif rng.random() >= stray:
            options = good_moves(numbers, target) or options
        a, op, b, result = rng.choice(options)
        numbers = after(numbers, a, b, result)
        steps.append(f"{a} {op} {b} = {result}, left {' '.join(map(str, numbers))}")
        parts: list[str] = []
        for value in (a, b):
            used = next(entry for entry in expressions if entry[0] == value)
            expressions.remove(used)
            parts.append(used[1] if used[1].isdigit() else f"({used[1]})")
        expressions.append((result, f"{parts[0]} {op} {parts[1]}"))
    return [*steps, f"\\boxed{{{expressions[0][1]}}}"]


def label_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Return for each step True if the attempt is still right after it.

    A step is good if it is legal, its arithmetic and its list of numbers left are right, and the target is still
    reachable; the boxed step is good if the answer passes ``check``. After the first bad step all steps are bad.
    """
    numbers: list[int] = problem.data["numbers"]
    labels: list[bool] = []
    good = True
    for step in steps:
        left = apply(numbers, step)
        if left is not None:
            good = good and can_reach(left, problem.data["target"])
            numbers = left
        else:
            good = good and len(numbers) == 1 and check(problem, boxed(step))
        labels.append(good)
    return labels


def apply(numbers: Sequence[int], step: str) -> list[int] | None:
    """Return the numbers left after a legal and correct step, as written; ``None`` for any other text."""
    match = STEP.fullmatch(step)
    if match is None:
        return None
    a, b, result = int(match[1]), int(match[3]), int(match[4])
    if (max(a, b), match[2], min(a, b), result) not in moves(numbers) or (a < b and match[2] in "-/"):
        return None
    left = [int(number) for number in match[5].split()]
    return left if sorted(left) == sorted(after(numbers, a, b, result)) else None
