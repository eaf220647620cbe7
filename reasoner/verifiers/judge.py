"""A language model as a verifier of a search: one score for each node, of the solution as far as it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.adapters.judge import find_judge
from engine.protocol.types import InvalidRequest
from prm.scorers.judge import Judge
from prm.scorers.steps import VerifierScores
from reasoner.jobs.verifier_specs import JudgeVerifier
from reasoner.search.scoring import BudgetedReader, NodeScore, NodeScorer, check_fits_context, ends_at_step
from reasoner.tree import Node, Reads
from reasoner.verifiers.context import VerifierContext, estimate_new_tokens


async def open_judge(context: VerifierContext) -> NodeScorer:
    """Raises ``InvalidRequest`` if the model is not served, or answers a question of its own; ``EngineError`` if it
    cannot say Yes or No.
    """
    verifier = context.spec.verifier
    assert isinstance(verifier, JudgeVerifier)
    model = context.policy if verifier.model is None else context.verifier_model()
    if find_judge(model) is not None:
        raise InvalidRequest(
            f"verifier.kind: adapter {model.id!r} was trained on a question of its own, which is asked behind branches "
            f"by the verifier {json.dumps({'kind': 'graded', 'model': model.id})}",
            "verifier.kind",
        )
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
