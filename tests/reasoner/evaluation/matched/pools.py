"""Pools of made samples for tests."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.budget.usage import Usage
from reasoner.evaluation.matched.replay import AllRates, BudgetedPool, Rates
from reasoner.evaluation.pool import Sample, SamplePool
from reasoner.tree import Node
from tests.specs import build_spec


def make_pool(samples: Sequence[tuple[str, int]], *, max_tokens: int, score_tokens: float = 0.0) -> BudgetedPool:
    """Return a pool of samples with these answers and lengths, of which ``a`` is right.

    The verifier takes ``score_tokens`` for each, and the score is higher the earlier the letter.
    """
    root, made = Node((), None, (1,)), []
    for index, (letter, tokens) in enumerate(samples):
        node = Node((index,), root, (1, index), letter, tokens, reason="stop", answer=letter, answer_level="strict")
        score = 1.0 / ord(letter)
        made.append(Sample(node, letter == "a", "stop", (score,), score, frozenset({index})))
    spec = build_spec({"problem": "?", "strategy": {"name": "self_consistency"}, "answer": "text", "seed": 0})
    usage = Usage(generated=1, verifier_computed=int(score_tokens > 0))
    pool = SamplePool(spec, root, tuple(made), usage, (1, 1), (0.0, 0.0), verdict_tokens=score_tokens)
    flops = Rates(question=10.0, sample=1.0, token=2.0, verifier_token=3.0)
    return BudgetedPool(pool, AllRates(flops, Rates(), Rates()), "tokens", max_tokens)
