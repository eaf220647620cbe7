"""Particle filtering: n solutions are extended step by step and resampled by their weights after each step.

Source: Puri et al. 2025, "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based
Monte Carlo Methods", algorithm 1; the resampling is systematic (Kitagawa 1996), which adds the least noise. A
particle's weight is the odds of its score. Resampling is a barrier by definition.

Different from there, a finished particle keeps its slot and is neither copied nor lost, so the filter ends with n
solutions and not with n copies of the first; the slot of one that ended without an answer goes to the others. The
particles vote for their answers, as a filter's estimate is a mean over its particles; a vote is weighted by its last
score, since nothing was resampled after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from reasoner.answers.equivalence import Equivalence
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Steps, Strategy
from reasoner.strategies.tree.resampling import resampling_search

MIN_PROBABILITY = 1e-4
"""Distance that scores are kept from 0 and 1: the odds of a certain step would take every slot."""


class Particle(Params):
    n: Samples = 16
    max_steps: Steps = 40


async def run(search: Search, params: Particle, equivalence: Equivalence) -> Choice:
    """Extend n particles, resampled after each step by the odds of the verifier's scores; finished ones vote."""

    def allocate(step: int, scores: Sequence[float], slots: int) -> list[int]:
        return resample_systematically(
            [to_odds(score) for score in scores], slots, search.rng(search.root, f"step {step}")
        )

    return await resampling_search(search, params.n, params.max_steps, allocate, equivalence)


def to_odds(score: float) -> float:
    """Return p / (1 - p)."""
    probability = min(max(score, MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
    return probability / (1.0 - probability)


def resample_systematically(weights: Sequence[float], slots: int, rng: random.Random) -> list[int]:
    """Return how often each is sampled in ``slots`` samples: its expected number, rounded by one common offset."""
    counts, reached, drawn = [], 0.0, 0
    offset, total = rng.random(), sum(weights)
    for weight in weights:
        reached += slots * weight / total
        upto = max(drawn, min(slots, math.ceil(reached - offset)))  # draws at offset, offset + 1, … below ``reached``
        counts.append(upto - drawn)
        drawn = upto
    return counts


STRATEGY = Strategy("particle", Particle, run, needs_verifier=True, needs_steps=True, votes=True)
