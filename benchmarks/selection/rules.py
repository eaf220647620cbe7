"""The accuracy of rules that choose among n of N samples: exact where it has a closed form, else over random subsets.

The best of n by a score, and whether any of n is right, follow from the ranks of the N samples (hypergeometric). A vote
is counted over ``NUM_DRAWS`` subsets; equal votes share their weight.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from math import comb

NUM_DRAWS = 256


def pass_at(right: Sequence[bool], n: int) -> float:
    """Return the probability that any of n random samples is right."""
    total, wrong = len(right), sum(not each for each in right)
    return 1.0 - comb(wrong, n) / comb(total, n)


def best_at(right: Sequence[bool], scores: Sequence[float | None], n: int) -> float:
    """Return the probability that the sample with the highest score among n random ones is right.

    Of equal scores any is chosen. Samples without a score are never chosen.
    """
    total = len(right)
    scored = sorted(
        [(score, is_right) for score, is_right in zip(scores, right, strict=True) if score is not None], reverse=True
    )
    accuracy, ahead = 0.0, 0
    for _, group in groupby(scored, key=lambda pair: pair[0]):
        members = [is_right for _, is_right in group]
        none_ahead = comb(total - ahead, n)
        none_of_these = comb(total - ahead - len(members), n)
        accuracy += (none_ahead - none_of_these) / comb(total, n) * sum(members) / len(members)
        ahead += len(members)
    return accuracy


def vote_at(
    right: Sequence[bool],
    classes: Sequence[int | None],
    n: int,
    rng: random.Random,
    weights: Sequence[float | None] | None = None,
) -> float:
    """Return the mean accuracy of the vote of n samples over random subsets; scores, if there are any, are weights."""
    indices = range(len(right))
    draws = NUM_DRAWS if n < len(right) else 1
    if weights is None or all(weight is None for weight in weights):
        weights = [1.0] * len(right)
    total = 0.0
    for _ in range(draws):
        votes: dict[int, float] = defaultdict(float)
        is_right: dict[int, bool] = {}
        for index in rng.sample(indices, n):
            number = classes[index]
            if number is not None:
                votes[number] += weights[index] or 0.0
                is_right[number] = right[index]
        if votes:
            most = max(votes.values())
            leaders = [number for number, weight in votes.items() if weight >= most * (1 - 1e-12)]
            total += sum(is_right[number] for number in leaders) / len(leaders)
    return total / draws
