"""Self-consistency: sample several solutions and take the answer that most of them reach.

Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", section 2.
"""

from __future__ import annotations

from reasoner.equivalence import Equivalence
from reasoner.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Strategy, majority


class SelfConsistency(Params):
    n: Samples = 16


async def run(search: Search, params: SelfConsistency, equivalence: Equivalence) -> Choice:
    """Samples n solutions; the most frequent answer wins, and its share of the votes is the confidence."""
    async for _ in search.complete([search.root], params.n):
        pass
    candidates = search.candidates()
    return await majority(search, candidates, dict.fromkeys(candidates, 1.0), equivalence)


STRATEGY = Strategy("self_consistency", SelfConsistency, run, needs_verifier=False)
