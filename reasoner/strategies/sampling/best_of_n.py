"""Best of N: sample several solutions and take the one that the verifier scores highest.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", section 4, with a process reward model's
aggregated step scores (Lightman et al. 2023, "Let's Verify Step by Step", section 2.6) in place of an outcome score.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.abandon import Abandon, sample_solutions
from reasoner.strategies.base import Choice, Feature, Params, Samples, Strategy, VerifierUse, choose_best_scored


class BestOfN(Params):
    n: Samples = 16
    abandon: Annotated[Abandon | None, Field(description="Give up solutions early; without it all are finished.")] = (
        None
    )


async def run(search: Search, params: BestOfN) -> Choice:
    """Sample n solutions, score each as it arrives; the highest score wins and is the confidence.

    If the verifier is a rule, the first right solution ends the search and the others are cancelled.
    """
    async with aclosing(sample_solutions(search, params.n, params.abandon)) as solutions:
        async for arrived in solutions:
            if search.spec.has_conclusive_verifier and any(node.score == 1.0 for node in arrived):
                break
    return choose_best_scored(search.candidates())


STRATEGY = Strategy(
    "best_of_n",
    BestOfN,
    run,
    VerifierUse.SCORES,
    supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS},
    scores_steps=lambda params: params.abandon is not None,
)
