"""How well scores tell good steps from bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GOOD = 0.5
"""Labels from here on count as good."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Over the steps of questions that training did not see.

    ``auc`` is the chance that a good step scores above a bad one (a tie is half). ``within`` compares steps of the same
    question only, and is the mean over questions: an AUC over all rewards knowing which questions are hard, too, and
    that picks no solution. Both are ``None`` where there is nothing to compare.
    """

    steps: int
    good: int
    loss: float
    """Cross-entropy in nats."""
    auc: float | None
    within: float | None


def validate(loss: float, scores: Sequence[float], labels: Sequence[float], questions: Sequence[str]) -> Validation:
    """Scores, labels and questions of all steps; ``loss`` is their mean."""
    scored, good = np.array(scores), np.array(labels) >= GOOD
    of = np.array(questions)
    each = [auc(scored[of == question], good[of == question]) for question in dict.fromkeys(questions)]
    known = [value for value in each if value is not None]
    return Validation(
        steps=len(scored),
        good=int(good.sum()),
        loss=loss,
        auc=auc(scored, good),
        within=float(np.mean(known)) if known else None,
    )


def auc(scores: NDArray[np.float64], good: NDArray[np.bool_]) -> float | None:
    """The share of (good, bad) pairs in which the good one scores higher (Mann and Whitney 1947)."""
    wins, losses = int(good.sum()), int((~good).sum())
    if not wins or not losses:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[good].sum() - wins * (wins + 1) / 2) / (wins * losses))
