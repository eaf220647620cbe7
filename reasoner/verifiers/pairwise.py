"""A language model that decides which of two solutions is better, as a verifier of a search.

Models prefer a place: many choose the first solution more often than the second, whatever is in it. So each pair is
asked in both orders, and the probability that a solution is better is the mean over both. A judge that always names
the first place gives every solution one half.

Source: Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", section 3.3 (position bias).
"""

from __future__ import annotations

from collections.abc import Sequence

from prm.scorers.verdict_formats import open_compare_format, parse_compare_template, with_changes
from reasoner.jobs.verifier_specs import PairwiseVerifier
from reasoner.search.scoring import PairScore, PairScorer
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext
from reasoner.verifiers.written import (
    BudgetedVerdicts,
    Judgement,
    Question,
    find_model,
    open_verdicts,
    shorten,
    weigh_criteria,
)

Pair = tuple[Node, Node]


async def open_pairwise(context: VerifierContext) -> PairScorer:
    """Raises ``InvalidRequest`` if the model is not served, or cannot be asked as the verifier says."""
    verifier = context.spec.verifier
    assert isinstance(verifier, PairwiseVerifier)
    model = find_model(context)
    verdict_format = with_changes(open_compare_format(model), verifier.template, verifier.verdict, None)
    verdicts = await open_verdicts(context, model, verdict_format, parse_compare_template)
    await verdicts.check_fits({"first": "", "second": ""})
    return WrittenPairScorer(verifier, verdicts)


class WrittenPairScorer:
    """A ``PairScorer`` that asks in both orders."""

    def __init__(self, verifier: PairwiseVerifier, verdicts: BudgetedVerdicts) -> None:
        self._verifier = verifier
        self._verdicts = verdicts

    async def compare(self, pairs: Sequence[Pair]) -> list[PairScore]:
        questions = {pair: await self._create_questions(pair) for pair in pairs}
        return [self._score(answered) for answered in await self._verdicts.read(questions)]

    async def _create_questions(self, pair: Pair) -> list[Question]:
        """Return the questions about a pair: those of all criteria in its order, then those in the other one."""
        first, second = (node.read_text(self._verifier.reads).strip() for node in pair)
        key = f"compare:{pair[0].id}:{pair[1].id}"
        return [
            *await self._verdicts.ask(f"{key}:0", {"first": first, "second": second}),
            *await self._verdicts.ask(f"{key}:1", {"first": second, "second": first}),
        ]

    def _score(self, answered: Judgement[Pair]) -> PairScore:
        verdicts, rubric = answered.verdicts, self._verifier.rubric
        width = len(verdicts) // 2
        orders = [(verdicts[index].score, verdicts[width + index].score) for index in range(width)]
        scores = [None if a is None or b is None else 0.5 + (a - b) / 2.0 for a, b in orders]
        details: dict[str, object] = {"verdicts": [shorten(verdict) for verdict in verdicts]}
        if rubric:
            details["criteria"] = dict(zip([criterion.name for criterion in rubric], scores, strict=True))
        return PairScore(
            answered.item,
            weigh_criteria(rubric, scores),
            spend=answered.spend,
            reserved=answered.reserved,
            details=details,
        )
