"""Particle filtering: n solutions are extended step by step and resampled by their weights after each step.

Source: Puri et al. 2025, "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based
Monte Carlo Methods", algorithm 1, with systematic resampling (Kitagawa 1996), which has the least variance. A
particle's weight is the odds of its score. Resampling is a barrier.

Unlike the paper, a finished particle keeps its slot and is neither copied nor dropped, so the filter ends with n
solutions and not with n copies of the first; the slot of a particle that ended without an answer goes to the others.
The answer is a vote of the particles, as a filter's estimate is a mean over its particles; votes are weighted by the
last score, after which no resampling took place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Params, Samples, Steps, Strategy, VerifierUse
from reasoner.strategies.tree.resampling import resampling_search

MIN_PROBABILITY = 1e-4
"""Minimum distance of scores from 0 and 1, since the odds of a certain step would take every slot."""


class Particle(Params):
    n: Samples = 16
    max_steps: Steps = 40


async def run(search: Search, params: Particle) -> Choice:
    """Extend n particles, which are resampled after each step by the odds of their scores; finished ones vote."""

    def allocate(step: int, scores: Sequence[float], slots: int) -> list[int]:
        return resample_systematically(
            [to_odds(score) for score in scores], slots, search.rng(search.root, f"step {step}")
        )

    return await resampling_search(search, params.n, params.max_steps, allocate)


def to_odds(score: float) -> float:
    """Return p / (1 - p)."""
    probability = min(max(score, MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
    return probability / (1.0 - probability)


def resample_systematically(weights: Sequence[float], slots: int, rng: random.Random) -> list[int]:
    """Return the number of copies of each particle: its expected number in ``slots``, rounded by one common offset."""
    counts, reached, drawn = [], 0.0, 0
    offset, total = rng.random(), sum(weights)
    for weight in weights:
        reached += slots * weight / total
        upto = max(drawn, min(slots, math.ceil(reached - offset)))  # samples at offset, offset + 1, … below ``reached``
        counts.append(upto - drawn)
        drawn = upto
    return counts


STRATEGY = Strategy("particle", Particle, run=run, verifier=VerifierUse.STEP_SCORES, decided_by=DecidedBy.VOTE)
