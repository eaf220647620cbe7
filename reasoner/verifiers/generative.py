"""A language model that writes a critique before its verdict, as a verifier of a search."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import InvalidRequest
from prm.formats.base import as_text
from prm.scorers.templates import PromptTemplate, TemplateRefused
from prm.scorers.verdict_formats import open_check_format, parse_check_template, with_changes
from prm.scorers.verdicts import VerdictWriter
from reasoner.jobs.verifier_specs import Criterion, GenerativeVerifier
from reasoner.search.scoring import (
    NodeScore,
    NodeScorer,
    aggregate_score,
    ends_at_step,
    inherited_scores,
)
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

STEP_SEPARATOR = "\n\n"


async def open_generative(context: VerifierContext) -> NodeScorer:
    """Raises ``InvalidRequest`` if the model is not served, or cannot be asked as the verifier says."""
    verifier = context.spec.verifier
    assert isinstance(verifier, GenerativeVerifier)
    model = context.policy if verifier.model is None else context.verifier_model()
    scale = verifier.labels if isinstance(verifier.labels, str) else None
    found = open_check_format(verifier.format, model, scale)
    found = with_changes(found, verifier.template, verifier.verdict, verifier.label_scores)
    try:
        template = parse_check_template(found.template, has_criteria=bool(verifier.rubric))
    except TemplateRefused as error:
        raise InvalidRequest(f"verifier.template: model {model.id!r}: {error}", "verifier.template") from None
    writer, verdicts = await open_verdicts(context, verifier, model, found)
    question = as_text(context.spec.conversation)
    empty = await writer.encode(render(template, _describe(question, "", ()), None))
    check_fits_verifier(writer, empty)
    return GenerativeNodeScorer(question, verifier, template, writer, verdicts)


class GenerativeNodeScorer:
    """A ``NodeScorer`` for nodes whose text ends where a step does."""

    def __init__(
        self,
        question: str,
        verifier: GenerativeVerifier,
        template: PromptTemplate,
        writer: VerdictWriter,
        verdicts: BudgetedVerdicts,
    ) -> None:
        self._question = question
        self._verifier = verifier
        self._template = template
        self._writer = writer
        self._verdicts = verdicts

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip()) and bool(self._read(node).strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        questions = {node: await self._ask(node) for node in nodes}
        return [self._score(answered) for answered in await self._verdicts.read(questions)]

    async def _ask(self, node: Node) -> list[Question]:
        """Return the questions about a node: for each step that it adds, or for its end, one for each criterion."""
        text = self._read(node)
        steps = [step.strip() for step in text.split(STEP_SEPARATOR) if step.strip()]
        first = len(steps) - 1
        if self._verifier.by_step:
            first = min(first, len(inherited_scores(node)))
        questions = []
        for end in range(first + 1, len(steps) + 1):
            solution = text.strip() if end == len(steps) else STEP_SEPARATOR.join(steps[:end])
            values = _describe(self._question, solution, steps[:end])
            for criterion in self._criteria:
                name = "" if criterion is None else criterion.name
                prompt = await self._writer.encode(render(self._template, values, criterion))
                questions.append(Question(f"verdict:{node.id}:{end}:{name}", prompt))
        return questions

    def _score(self, answered: Answered[Node]) -> NodeScore:
        node, verdicts, width = answered.item, answered.verdicts, len(self._criteria)
        groups = [verdicts[start : start + width] for start in range(0, len(verdicts), width)]
        rubric = self._verifier.rubric
        steps = [weigh_criteria(rubric, [verdict.score for verdict in group]) for group in groups]
        details: dict[str, object] = {"verdicts": [[shorten(verdict) for verdict in group] for group in groups]}
        if rubric:
            names = [criterion.name for criterion in rubric]
            details["criteria"] = dict(zip(names, [verdict.score for verdict in groups[-1]], strict=True))
        counted = tuple(step for step in steps if step is not None)
        if len(counted) < len(steps):
            return NodeScore(node, None, (), answered.spend, answered.reserved, details)
        score = aggregate_score(inherited_scores(node) + counted, self._verifier.aggregation)
        return NodeScore(node, score, counted, answered.spend, answered.reserved, details)

    @property
    def _criteria(self) -> Sequence[Criterion | None]:
        return self._verifier.rubric or [None]

    def _read(self, node: Node) -> str:
        return node.read_text(self._verifier.reads)


def _describe(question: str, solution: str, steps: Sequence[str]) -> dict[str, str | Sequence[str]]:
    """Return the values of a template's variables, but for the criterion."""
    return {"question": question, "solution": solution, "steps": steps, "step": steps[-1] if steps else ""}
