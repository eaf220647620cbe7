"""Aggregation of step scores to the score of a solution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "max": max,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregate(scores: Sequence[float], how: str) -> float:
    return AGGREGATIONS[how](scores)
