"""Best of N: sample several solutions and take the one that the verifier scores highest.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", section 4, with a process reward model's
aggregated step scores (Lightman et al. 2023, "Let's Verify Step by Step", section 2.6) in place of an outcome score.
"""

from __future__ import annotations

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Feature, Params, Samples, Strategy, VerifierUse, choose_best_scored


class BestOfN(Params):
    n: Samples = 16


async def run(search: Search, params: BestOfN) -> Choice:
    """Sample n solutions, score each as it arrives; the highest score wins and is the confidence.

    If the verifier is a rule, the first right solution ends the search and the others are cancelled.
    """
    async with search.stream() as stream:
        stream.complete(*search.spread(params.n))
        async for arrived in stream:
            await search.score([node for node in arrived if node.answer is not None])
            if search.spec.has_conclusive_verifier and any(node.score == 1.0 for node in arrived):
                break
    return choose_best_scored(search.candidates())


STRATEGY = Strategy(
    "best_of_n", BestOfN, run, VerifierUse.SCORES, supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS}
)
