"""Weighted vote: sample several solutions; each votes for its answer with the verifier's score as its weight.

Source: Li et al. 2022, "Making Large Language Models Better Reasoners with Step-Aware Verifier", section 3.2; with
process reward models: Snell et al. 2024, "Scaling LLM Test-Time Compute Optimally", section 5.1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.abandon import Abandon, sample_solutions
from reasoner.strategies.base import (
    Choice,
    DecidedBy,
    Feature,
    Params,
    Samples,
    Strategy,
    VerifierUse,
    choose_by_majority,
    weigh_by_score,
)


class WeightedVote(Params):
    n: Samples = 16
    abandon: Annotated[Abandon | None, Field(description="Give up solutions early; without it all are finished.")] = (
        None
    )


async def run(search: Search, params: WeightedVote) -> Choice:
    """Sample n solutions, score each as it arrives; the answer with the largest sum of scores wins."""
    async for _ in sample_solutions(search, params.n, params.abandon):
        pass
    candidates = search.candidates()
    return await choose_by_majority(search, candidates, weigh_by_score(candidates))


STRATEGY = Strategy(
    "weighted_vote",
    WeightedVote,
    run=run,
    verifier=VerifierUse.SCORES,
    decided_by=DecidedBy.VOTE,
    supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS},
    scores_steps=lambda params: params.abandon is not None,
)
