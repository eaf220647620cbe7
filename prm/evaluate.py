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

import numpy as np

from prm.records import read_records

NO_ERROR = -1

Scores = tuple[float | None, ...]
"""Scores of a solution's steps; ``None`` for blank steps and those without a verdict, which are never predicted."""


@dataclass(frozen=True, slots=True)
class ProcessBenchCase:
    """One solution. ``label`` is the index of its first wrong step, -1 if there is none."""

    id: str
    generator: str
    problem: str
    steps: tuple[str, ...]
    final_answer_correct: bool
    label: int


Score = Callable[[ProcessBenchCase, tuple[str, ...]], Awaitable[Sequence[float | None]]]
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
    results: dict[int, Scores] = {}
    waiting = enumerate(cases)

    async def work() -> None:
        for index, case in waiting:
            values = iter(await score(case, tuple(step for step in case.steps if step.strip())))
            results[index] = tuple(next(values) if step.strip() else None for step in case.steps)
            on_progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [results[index] for index in sorted(results)]


def predict(scores: Scores, threshold: float) -> int:
    """Return the index of the first step with a score below the threshold, or -1."""
    return next((index for index, score in enumerate(scores) if score is not None and score < threshold), NO_ERROR)


def evaluate(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores], threshold: float) -> Result:
    right: dict[bool, list[bool]] = {True: [], False: []}
    for case, own in zip(cases, scores, strict=True):
        right[case.label != NO_ERROR].append(predict(own, threshold) == case.label)
    error, correct = (_compute_share(right[erroneous]) for erroneous in (True, False))
    return Result(
        len(cases),
        len(right[True]),
        threshold=threshold,
        error_accuracy=error,
        correct_accuracy=correct,
        f1=harmonic_mean(error, correct),
    )


def fit_threshold(cases: Sequence[ProcessBenchCase], scores: Sequence[Scores]) -> float:
    """Return the threshold with the largest F1 on these cases: the middle of the lowest interval that attains it.

    Raises ``ValueError`` if F1 is undefined. A case is predicted correctly within one interval of thresholds, so the
    middles between the ends of all intervals cover every threshold.
    """
    is_erroneous = np.array([case.label != NO_ERROR for case in cases], np.bool_)
    if is_erroneous.all() or not is_erroneous.any():
        raise ValueError("a threshold is fitted on solutions of both kinds, with an error and without")
    low, high = np.array([_correct_interval(case, own) for case, own in zip(cases, scores, strict=True)]).T
    ends = np.unique(np.concatenate(([0.0, 1.0], low[low < high], high[low < high])))
    middles = (ends[:-1] + ends[1:]) / 2
    is_correct = (low < middles[:, None]) & (middles[:, None] <= high)
    error, correct = is_correct[:, is_erroneous].mean(axis=1), is_correct[:, ~is_erroneous].mean(axis=1)
    f1 = error * correct / (error + correct).clip(min=1e-300)
    return float(middles[f1.argmax()])


def harmonic_mean(first: float | None, second: float | None) -> float | None:
    """Return the harmonic mean (F1) of two accuracies: 0 if one of them is 0, ``None`` if one is."""
    if first is None or second is None:
        return None
    return 2 * first * second / (first + second) if first and second else 0.0


def _correct_interval(case: ProcessBenchCase, scores: Scores) -> tuple[float, float]:
    """Return (low, high) so that thresholds in the half-open interval (low, high] predict the case's label."""
    before = scores if case.label == NO_ERROR else scores[: case.label]
    high = min((score for score in before if score is not None), default=1.0)
    if case.label == NO_ERROR:
        return 0.0, high
    first_wrong = scores[case.label]
    return (1.0 if first_wrong is None else first_wrong), high


def _compute_share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None
