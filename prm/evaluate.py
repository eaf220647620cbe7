"""ProcessBench's protocol: evaluates if a process reward model finds the first wrong step of a solution.

The prediction is the first step with a score below a threshold, or no step. The metric is the harmonic mean (F1) of two
accuracies: on solutions with an error (the first wrong step must be predicted) and on those without (no step may be
predicted).

Source: Zheng et al. 2024, "ProcessBench", https://arxiv.org/abs/2412.06559. There the threshold of a PRM is fitted on
another split (GSM8K's, for all subsets).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prm.records import read_records

NO_ERROR = -1

Scores = tuple[float | None, ...]
"""Scores of a solution's steps; ``None`` for blank steps, which are never predicted."""


@dataclass(frozen=True, slots=True)
class ProcessBenchCase:
    """One solution. ``label`` is the index of its first wrong step, -1 if there is none."""

    id: str
    generator: str
    problem: str
    steps: tuple[str, ...]
    final_answer_correct: bool
    label: int


Score = Callable[[ProcessBenchCase, tuple[str, ...]], Awaitable[Sequence[float]]]
"""Function that returns the scores of a case's non-blank steps."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an evaluation. An accuracy is ``None`` if there is no such solution, and then F1 is ``None``, too."""

    cases: int
    erroneous: int
    threshold: float
    error_accuracy: float | None
    correct_accuracy: float | None
    f1: float | None


def read_cases(path: Path) -> list[ProcessBenchCase]:
    """Read a file in ProcessBench's format: JSONL, or a JSON array as published. Raises ``BadRecord``."""
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
    """Return the scores of every case's steps, in the order of the cases. Raises the errors of ``score``."""
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
    """Return the index of the first step with a score below the threshold, or -1."""
    return next((index for index, score in enumerate(scores) if score is not None and score < threshold), NO_ERROR)


def evaluate(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores], threshold: float) -> Result:
    """Evaluate the protocol at one threshold."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    for case, given in zip(cases, scores, strict=True):
        right[case.label != NO_ERROR].append(predict(given, threshold) == case.label)
    error, correct = (_share(right[erroneous]) for erroneous in (True, False))
    return Result(len(cases), len(right[True]), threshold, error, correct, harmonic_mean(error, correct))


def fit_threshold(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores]) -> float:
    """Return the threshold with the largest F1 on these cases: the middle of the lowest interval that attains it.

    Raises ``ValueError`` if F1 is undefined. A case is predicted correctly within one interval of thresholds, so one
    sweep over the ends of all intervals covers every threshold.
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
    """Return the harmonic mean (F1) of two accuracies: 0 if one of them is 0, ``None`` if one is."""
    if first is None or second is None:
        return None
    return 2 * first * second / (first + second) if first and second else 0.0


def _right_between(case: ProcessBenchCase, scores: Scores) -> tuple[float, float]:
    """Return (low, high) so that thresholds in the half-open interval (low, high] predict the case's label."""
    before = scores if case.label == NO_ERROR else scores[: case.label]
    high = min((score for score in before if score is not None), default=1.0)
    if case.label == NO_ERROR:
        return 0.0, high
    first_wrong = scores[case.label]
    return (1.0 if first_wrong is None else first_wrong), high


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None
