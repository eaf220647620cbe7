"""A language model that decides which of two solutions is better, as a verifier of a search.

Models prefer a place: many choose the first solution more often than the second, whatever is in it. So each pair is
asked in both orders, and the probability that a solution is better is the mean over both. A judge that always names
the first place gives every solution one half.

Source: Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", section 3.3 (position bias).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import InvalidRequest
from prm.formats.base import as_text
from prm.scorers.templates import PromptTemplate, TemplateRefused
from prm.scorers.verdict_formats import open_compare_format, parse_compare_template, with_changes
from prm.scorers.verdicts import VerdictWriter
from reasoner.jobs.verifier_specs import Criterion, PairwiseVerifier
from reasoner.search.scoring import PairScore, PairScorer
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext
from reasoner.verifiers.written import (
    Answered,
    BudgetedVerdicts,
    Question,
    check_fits_verifier,
    open_verdicts,
    render,
    shorten,
    weigh_criteria,
)

Pair = tuple[Node, Node]


async def open_pairwise(context: VerifierContext) -> PairScorer:
    """Raises ``InvalidRequest`` if the model is not served, or cannot be asked as the verifier says."""
    verifier = context.spec.verifier
    assert isinstance(verifier, PairwiseVerifier)
    model = context.policy if verifier.model is None else context.verifier_model()
    found = with_changes(open_compare_format(model), verifier.template, verifier.verdict, None)
    try:
        template = parse_compare_template(found.template, has_criteria=bool(verifier.rubric))
    except TemplateRefused as error:
        raise InvalidRequest(f"verifier.template: model {model.id!r}: {error}", "verifier.template") from None
    writer, verdicts = await open_verdicts(context, verifier, model, found)
    question = as_text(context.spec.conversation)
    empty = await writer.encode(render(template, {"question": question, "first": "", "second": ""}, None))
    check_fits_verifier(writer, empty)
    return WrittenPairScorer(question, verifier, template, writer, verdicts)


class WrittenPairScorer:
    """A ``PairScorer`` that asks in both orders."""

    def __init__(
        self,
        question: str,
        verifier: PairwiseVerifier,
        template: PromptTemplate,
        writer: VerdictWriter,
        verdicts: BudgetedVerdicts,
    ) -> None:
        self._question = question
        self._verifier = verifier
        self._template = template
        self._writer = writer
        self._verdicts = verdicts

    async def compare(self, pairs: Sequence[Pair]) -> list[PairScore]:
        questions = {pair: await self._ask(pair) for pair in pairs}
        return [self._score(answered) for answered in await self._verdicts.read(questions)]

    async def _ask(self, pair: Pair) -> list[Question]:
        """Return the questions about a pair: by each criterion, in both orders."""
        first, second = (node.read_text(self._verifier.reads).strip() for node in pair)
        questions = []
        for criterion in self._criteria:
            name = "" if criterion is None else criterion.name
            for order, (a, b) in enumerate(((first, second), (second, first))):
                values = {"question": self._question, "first": a, "second": b}
                prompt = await self._writer.encode(render(self._template, values, criterion))
                questions.append(Question(f"compare:{pair[0].id}:{pair[1].id}:{name}:{order}", prompt))
        return questions

    def _score(self, answered: Answered[Pair]) -> PairScore:
        verdicts = answered.verdicts
        orders = [(verdicts[index].score, verdicts[index + 1].score) for index in range(0, len(verdicts), 2)]
        scores = [None if a is None or b is None else (a + 1.0 - b) / 2.0 for a, b in orders]
        details: dict[str, object] = {"verdicts": [shorten(verdict) for verdict in verdicts]}
        if self._verifier.rubric:
            names = [criterion.name for criterion in self._verifier.rubric]
            details["criteria"] = dict(zip(names, scores, strict=True))
        score = weigh_criteria(self._verifier.rubric, scores)
        return PairScore(answered.item, score, answered.spend, answered.reserved, details)

    @property
    def _criteria(self) -> Sequence[Criterion | None]:
        return self._verifier.rubric or [None]
