"""A language model as a verifier of a search: one score for each node, of the solution as far as it goes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import InvalidRequest, ModelInfo
from prm.scorers.grades import read_judge
from prm.scorers.judge import BranchJudge, Judge
from prm.scorers.steps import VerifierScores
from reasoner.jobs.verifier_specs import JudgeVerifier
from reasoner.search.scoring import BudgetedReader, NodeScore, NodeScorer, check_fits_context, ends_at_step
from reasoner.tree import Node, Reads
from reasoner.verifiers.context import ESTIMATE_SLACK_TOKENS, VerifierContext, estimate_new_tokens
from reasoner.verifiers.grade_prompts import wrote_branches


async def open_judge(context: VerifierContext) -> NodeScorer:
    """Raises ``InvalidRequest`` if the model is not served, ``EngineError`` if it cannot say Yes or No."""
    verifier = context.spec.verifier
    assert isinstance(verifier, JudgeVerifier)
    model = context.policy if verifier.model is None else context.verifier_model()
    if read_judge(model) is not None:
        return _open_branch_judge(context, model)
    judge = await Judge.open(context.engine, model, context.spec.rendered_conversation, context.pin_key)
    head = await judge.head()
    check_fits_context(model, head)
    return JudgeNodeScorer(
        judge,
        head,
        reader=BudgetedReader(context.ledger, model),
        aggregation=verifier.aggregation,
        reads=verifier.reads,
    )


def _open_branch_judge(context: VerifierContext, model: ModelInfo) -> NodeScorer:
    """Return the scorer of an adapter that was trained to judge its base's branches."""
    verifier = context.spec.verifier
    assert isinstance(verifier, JudgeVerifier)
    if model.id == context.policy.id or not wrote_branches(model, context):
        raise InvalidRequest(
            f"verifier.model: {model.id!r} judges branches of {model.parent!r} alone, whose keys it reads; use it with "
            f"'model': {model.parent!r}, or name another verifier",
            "verifier.model",
        )
    judge = BranchJudge(context.engine, model, context.pin_key)
    check_fits_context(model, len(judge.invocation))
    return BranchNodeScorer(judge, BudgetedReader(context.ledger, model), verifier.aggregation)


class BranchNodeScorer:
    """A ``NodeScorer`` that reads the tokens of the branches themselves, on the keys of the policy."""

    def __init__(self, judge: BranchJudge, reader: BudgetedReader, aggregation: str) -> None:
        self._judge, self._reader, self._aggregation = judge, reader, aggregation

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        new = len(self._judge.invocation) + ESTIMATE_SLACK_TOKENS
        return await self._reader.score_steps(dict.fromkeys(nodes, new), self._ask_scorer, self._aggregation)

    async def _ask_scorer(self, nodes: Sequence[Node], bound: int | None) -> Sequence[VerifierScores]:
        branches = [node.prefix[:-1] if node.ended_with_eos else node.prefix for node in nodes]
        return await self._judge.score(branches, max_compute=bound)


class JudgeNodeScorer:
    """A ``NodeScorer`` for nodes whose text ends where a step does."""

    def __init__(self, judge: Judge, head: int, reader: BudgetedReader, aggregation: str, reads: Reads) -> None:
        self._judge = judge
        self._head = head
        self._reader = reader
        self._aggregation = aggregation
        self._reads = reads

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip()) and bool(node.read_text(self._reads).strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        estimates = {node: estimate_new_tokens(node, self._head, self._reads) for node in nodes}
        return await self._reader.score_steps(estimates, self._ask_scorer, self._aggregation)

    async def _ask_scorer(self, nodes: Sequence[Node], bound: int | None) -> Sequence[VerifierScores]:
        return await self._judge.score([node.read_text(self._reads) for node in nodes], max_compute=bound)
