"""ProcessBench's protocol: does a process reward model find the first wrong step of a solution?

The model predicts the first step whose score lies below a threshold, or that all are right. The measure is the harmonic
mean (F1) of two accuracies: on solutions with an error (the predicted step must be the very first wrong one) and on
those without (no step may be predicted).

Source: Zheng et al. 2024, "ProcessBench", https://arxiv.org/abs/2412.06559. There the threshold of a PRM is the
best one on another split (GSM8K's, for all subsets).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prm.records import read_records

NO_ERROR = -1

Scores = tuple[float | None, ...]
"""A score for each step; blank steps have none, and are never predicted."""


@dataclass(frozen=True, slots=True)
class ProcessBenchCase:
    """One solution. ``label``: index of its first wrong step, -1 if there is none."""

    id: str
    generator: str
    problem: str
    steps: tuple[str, ...]
    final_answer_correct: bool
    label: int


Score = Callable[[ProcessBenchCase, tuple[str, ...]], Awaitable[Sequence[float]]]
"""Scores of a case's steps, those that are not blank."""


@dataclass(frozen=True, slots=True)
class Result:
    """Accuracies are ``None`` where there is no such solution; then there is no F1 either."""

    cases: int
    erroneous: int
    threshold: float
    error_accuracy: float | None
    correct_accuracy: float | None
    f1: float | None


def read_cases(path: Path) -> list[ProcessBenchCase]:
    """The cases of a file in ProcessBench's format: JSONL, or a JSON array as it is published. Raises ``BadRecord``."""
    cases = []
    for record in read_records(path):
        steps = record.texts("steps")
        if not any(step.strip() for step in steps):
            raise record.wrong("steps", "a list of texts that are not all blank")
        cases.append(
            ProcessBenchCase(
                id=record.text("id"),
                generator=record.text("generator"),
                problem=record.text("problem"),
                steps=steps,
                final_answer_correct=record.flag("final_answer_correct"),
                label=record.integer("label", NO_ERROR, len(steps) - 1),
            )
        )
    return cases


async def score_cases(
    cases: Iterable[ProcessBenchCase],
    score: Score,
    *,
    concurrency: int = 16,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Scores]:
    """Scores of every case's steps, in the order of the cases. Raises what ``score`` raises."""
    places = list(enumerate(cases))
    found: dict[int, Scores] = {}
    waiting = iter(places)

    async def work() -> None:
        for place, case in waiting:
            given = iter(await score(case, tuple(step for step in case.steps if step.strip())))
            found[place] = tuple(next(given) if step.strip() else None for step in case.steps)
            on_progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(places))):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [found[place] for place, _ in places]


def predict(scores: Scores, threshold: float) -> int:
    """Index of the first step whose score lies below the threshold, or -1."""
    return next((index for index, score in enumerate(scores) if score is not None and score < threshold), NO_ERROR)


def evaluate(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores], threshold: float) -> Result:
    """The protocol at one threshold."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    for case, given in zip(cases, scores, strict=True):
        right[case.label != NO_ERROR].append(predict(given, threshold) == case.label)
    error, correct = (_share(right[erroneous]) for erroneous in (True, False))
    return Result(len(cases), len(right[True]), threshold, error, correct, harmonic_mean(error, correct))


def fit_threshold(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores]) -> float:
    """A threshold with the largest F1 on these cases; the middle of the interval in which it is so (of several the
    lowest). Raises ``ValueError`` where F1 is not defined.

    Predictions change only where a score is passed that is below all scores before it, and a case is predicted right
    within one interval of thresholds: all of them are tried by sweeping once over the ends of the intervals.
    """
    erroneous = sum(case.label != NO_ERROR for case in cases)
    if not 0 < erroneous < len(cases):
        raise ValueError("a threshold is fitted on solutions of both kinds, with an error and without")
    changes: dict[float, list[int]] = {0.0: [0, 0]}
    for case, given in zip(cases, scores, strict=True):
        low, high = _right_between(case, given)
        if low < high:
            kind = int(case.label != NO_ERROR)
            changes.setdefault(low, [0, 0])[kind] += 1
            changes.setdefault(high, [0, 0])[kind] -= 1
    ends = sorted(changes)
    now, best, place = [0, 0], -1.0, (0.0, 1.0)
    for low, high in zip(ends, [*ends[1:], 1.0], strict=True):
        now = [before + change for before, change in zip(now, changes[low], strict=True)]
        reached = harmonic_mean(now[1] / erroneous, now[0] / (len(cases) - erroneous)) or 0.0
        if reached > best:
            best, place = reached, (low, high)
    return (place[0] + place[1]) / 2


def harmonic_mean(first: float | None, second: float | None) -> float | None:
    """F1 of two accuracies: zero where one of them is."""
    if first is None or second is None:
        return None
    return 2 * first * second / (first + second) if first and second else 0.0


def _right_between(case: ProcessBenchCase, scores: Scores) -> tuple[float, float]:
    """Thresholds above the first number, up to and including the second, predict the case's label."""
    before = scores if case.label == NO_ERROR else scores[: case.label]
    high = min((score for score in before if score is not None), default=1.0)
    if case.label == NO_ERROR:
        return 0.0, high
    first_wrong = scores[case.label]
    return (1.0 if first_wrong is None else first_wrong), high


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None
