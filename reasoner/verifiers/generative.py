"""A language model that writes a critique before its verdict, as a verifier of a search."""

from __future__ import annotations

from collections.abc import Sequence

from prm.scorers.steps import unify_line_ends
from prm.scorers.templates import Value
from prm.scorers.verdict_formats import open_check_format, parse_check_template, with_changes
from reasoner.jobs.verifier_specs import GenerativeVerifier
from reasoner.search.scoring import NodeScore, NodeScorer, aggregate_score, ends_at_step, inherited_scores
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

STEP_SEPARATOR = "\n\n"


async def open_generative(context: VerifierContext) -> NodeScorer:
    """Raises ``InvalidRequest`` if the model is not served, or cannot be asked as the verifier says."""
    verifier = context.spec.verifier
    assert isinstance(verifier, GenerativeVerifier)
    model = find_model(context)
    scale = verifier.labels if isinstance(verifier.labels, str) else None
    base = open_check_format(verifier.format, model, scale)
    verdict_format = with_changes(base, verifier.template, verifier.verdict, verifier.label_scores)
    verdicts = await open_verdicts(context, model, verdict_format, parse_check_template)
    await verdicts.check_fits(_describe("", ()))
    return GenerativeNodeScorer(verifier, verdicts)


class GenerativeNodeScorer:
    """A ``NodeScorer`` for nodes whose text ends where a step does."""

    def __init__(self, verifier: GenerativeVerifier, verdicts: BudgetedVerdicts) -> None:
        self._verifier = verifier
        self._verdicts = verdicts

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip()) and bool(self._read_node(node).strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        questions = {node: await self._create_questions(node) for node in nodes}
        return [self._score(answered) for answered in await self._verdicts.read(questions)]

    async def _create_questions(self, node: Node) -> list[Question]:
        """Return the questions about a node: for each step that it adds, or for its end, one for each criterion."""
        text = unify_line_ends(self._read_node(node))
        steps = [step.strip() for step in text.split(STEP_SEPARATOR) if step.strip()]
        first = len(steps) - 1
        if self._verifier.by_step:
            first = min(first, len(inherited_scores(node)))
        questions = []
        for end in range(first + 1, len(steps) + 1):
            solution = text.strip() if end == len(steps) else STEP_SEPARATOR.join(steps[:end])
            questions += await self._verdicts.ask(f"verdict:{node.id}:{end}", _describe(solution, steps[:end]))
        return questions

    def _score(self, answered: Judgement[Node]) -> NodeScore:
        node, verdicts, rubric = answered.item, answered.verdicts, self._verifier.rubric
        width = len(rubric) or 1
        groups = [verdicts[start : start + width] for start in range(0, len(verdicts), width)]
        steps = [weigh_criteria(rubric, [verdict.score for verdict in group]) for group in groups]
        details: dict[str, object] = {"verdicts": [[shorten(verdict) for verdict in group] for group in groups]}
        if rubric:
            names = [criterion.name for criterion in rubric]
            details["criteria"] = dict(zip(names, [verdict.score for verdict in groups[-1]], strict=True))
        counted = tuple(step for step in steps if step is not None)
        if len(counted) < len(steps):
            return NodeScore(node, None, steps=(), spend=answered.spend, reserved=answered.reserved, details=details)
        score = aggregate_score(inherited_scores(node) + counted, self._verifier.aggregation)
        return NodeScore(node, score, steps=counted, spend=answered.spend, reserved=answered.reserved, details=details)

    def _read_node(self, node: Node) -> str:
        return node.read_text(self._verifier.reads)


def _describe(solution: str, steps: Sequence[str]) -> dict[str, Value]:
    """Return the values of a template that describe a solution."""
    return {"solution": solution, "steps": steps, "step": steps[-1] if steps else ""}
