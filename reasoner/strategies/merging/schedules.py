"""Schedules of tournaments: which solutions meet in which round.

A schedule is a generator of rounds. It yields pairs of indices and is sent their results: the probabilities that the
first of each pair is better, one half where there was no verdict.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence

from reasoner.jobs.request import ScheduleName

IndexPair = tuple[int, int]
Results = Sequence[float]
Schedule = Generator[list[IndexPair], Results, None]


def run_knockout(count: int, rng: random.Random) -> Schedule:
    """Let winners go on until one is left: ``count - 1`` matches. An odd one out goes on without a match."""
    alive = rng.sample(range(count), count)
    while len(alive) > 1:
        pairs = list(zip(alive[::2], alive[1::2], strict=False))
        results = yield pairs
        winners = [first if score >= 0.5 else second for (first, second), score in zip(pairs, results, strict=True)]
        alive = winners + alive[2 * len(pairs) :]


def run_swiss(count: int, rng: random.Random) -> Schedule:
    """Pair those of about equal points that have not met, for log2(count) rounds of at most count / 2 matches."""
    order = rng.sample(range(count), count)
    points = dict.fromkeys(order, 0.0)
    met: set[frozenset[int]] = set()
    for _ in range(_log2(count)):
        waiting = sorted(order, key=lambda index: -points[index])
        pairs = []
        while len(waiting) > 1:
            first = waiting.pop(0)
            second = next((index for index in waiting if frozenset((first, index)) not in met), None)
            if second is not None:
                waiting.remove(second)
                pairs.append((first, second))
        if not pairs:
            return
        met.update(frozenset(pair) for pair in pairs)
        for (first, second), score in zip(pairs, (yield pairs), strict=True):
            points[first] += score
            points[second] += 1.0 - score


def run_pivot(count: int, rng: random.Random) -> Schedule:
    """Let everybody meet the same log2(count) random opponents, in one round."""
    pivots = rng.sample(range(count), min(_log2(count), count))
    yield [
        (index, pivot)
        for place, pivot in enumerate(pivots)
        for index in range(count)
        if index not in pivots[: place + 1]
    ]


SCHEDULES: Mapping[ScheduleName, Callable[[int, random.Random], Schedule]] = {
    "knockout": run_knockout,
    "swiss": run_swiss,
    "pivot": run_pivot,
}


def max_matches(name: ScheduleName, count: int) -> int:
    """Return the number of matches that a schedule has at most."""
    rounds = _log2(count)
    match name:
        case "knockout":
            return count - 1
        case "swiss":
            return rounds * (count // 2)
        case "pivot":
            pivots = min(rounds, count)
            return pivots * count - pivots * (pivots + 1) // 2


def _log2(count: int) -> int:
    return max(1, math.ceil(math.log2(count)))
