"""The gain that another sample promises: that the best answer is wrong, and the sample states a new one."""

from __future__ import annotations

from collections.abc import Sequence


def compute_gain(confidence: float, counts: Sequence[int], silent: int = 0) -> float:
    """Return the probability that the best answer is wrong and the next sample states a new one.

    ``confidence``: the probability that the best answer is right; the others as for ``compute_novelty``.
    """
    return (1.0 - confidence) * compute_novelty(counts, silent)


def compute_novelty(counts: Sequence[int], silent: int = 0) -> float:
    """Return the probability that the next sample states a new answer.

    ``counts`` are the votes of each answer, ``silent`` the samples without one. It is the share of samples whose answer
    no other one states, with one such sample and one other added, so that two that agree do not rule it out.

    Source: Good 1953, "The Population Frequencies of Species and the Estimation of Population Parameters".
    """
    return (sum(count == 1 for count in counts) + 1) / (sum(counts) + silent + 2)
