"""REBASE: the width of a level is allocated to its nodes in proportion to exp(score / temperature).

Source: Wu et al. 2024, "Inference Scaling Laws: An Empirical Analysis of Compute-Optimal Inference for LLM
Problem-Solving", section 3.2. Each level is a barrier, since its nodes share one width. A finished solution keeps its
slot; finished solutions vote with their scores (section 2.1, weighted majority).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Params, Samples, Steps, Strategy, VerifierUse
from reasoner.strategies.tree.resampling import resampling_search


class Rebase(Params):
    n: Samples = 16
    temperature: Annotated[float, Field(gt=0, le=100, description="Small: all to the best node; large: even.")] = 0.1
    max_steps: Steps = 40


async def run(search: Search, params: Rebase) -> Choice:
    """Extend n branches step by step, allocated at each level by the verifier's scores; finished ones vote."""

    def allocate(_: int, scores: Sequence[float], slots: int) -> list[int]:
        return allocate_proportionally(scores, slots, params.temperature)

    return await resampling_search(search, params.n, params.max_steps, allocate)


def allocate_proportionally(scores: Sequence[float], width: int, temperature: float) -> list[int]:
    """Split ``width`` in proportion to exp(score / temperature) into whole numbers, by largest remainders.

    Ties of remainders go to the first.
    """
    if not scores:
        return []
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    exact = [width * weight / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: width - sum(counts)]:
        counts[i] += 1
    return counts


STRATEGY = Strategy("rebase", Rebase, run=run, verifier=VerifierUse.STEP_SCORES, decided_by=DecidedBy.VOTE)
