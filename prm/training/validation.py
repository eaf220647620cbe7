"""Metrics of the separation of good steps from bad ones by their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GOOD = 0.5
"""Minimum label that counts as good."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Validation metrics over the steps of held-out questions.

    ``auc`` is the probability that a good step scores above a bad one (a tie counts half). ``within`` is the mean over
    questions of the AUC within a question: the global AUC also rewards estimates of a question's difficulty, which do
    not help to choose a solution. Both are ``None`` if there is nothing to compare.
    """

    steps: int
    good: int
    loss: float
    """Cross-entropy in nats."""
    auc: float | None
    within: float | None


def validate(loss: float, scores: Sequence[float], labels: Sequence[float], questions: Sequence[str]) -> Validation:
    """Compute the metrics from scores, labels and questions of all steps; ``loss`` is the mean loss."""
    scored, good = np.array(scores), np.array(labels) >= GOOD
    question_of = np.array(questions)
    each = [
        auc(scored[question_of == question], good[question_of == question]) for question in dict.fromkeys(questions)
    ]
    defined = [value for value in each if value is not None]
    return Validation(
        steps=len(scored),
        good=int(good.sum()),
        loss=loss,
        auc=auc(scored, good),
        within=float(np.mean(defined)) if defined else None,
    )


def auc(scores: NDArray[np.float64], good: NDArray[np.bool_]) -> float | None:
    """Return the fraction of (good, bad) pairs in which the good one scores higher (Mann and Whitney 1947)."""
    wins, losses = int(good.sum()), int((~good).sum())
    if not wins or not losses:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[good].sum() - wins * (wins + 1) / 2) / (wins * losses))
