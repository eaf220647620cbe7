"""An outcome reward model as a verifier: one score for a solution that is finished, none for a part of one."""

from __future__ import annotations

from collections.abc import Sequence

from prm.scorers.outcome import OutcomeScorer
from prm.scorers.steps import VerifierScores
from reasoner.budget.prices import Amount
from reasoner.jobs.verifier_specs import OutcomeVerifier
from reasoner.search.scoring import (
    BudgetedReader,
    NodeScore,
    NodeScorer,
    aggregate_score,
    check_fits_context,
    without_verdict,
)
from reasoner.tree import Node, Reads
from reasoner.verifiers.context import ESTIMATE_SLACK_TOKENS, VerifierContext


async def open_outcome(context: VerifierContext) -> NodeScorer:
    """Open an outcome reward model. Raises ``InvalidRequest`` if it is not served."""
    model = context.verifier_model()
    scorer = OutcomeScorer(context.engine, model, context.spec.rendered_conversation, context.pin_key)
    head = await scorer.head()
    check_fits_context(model, head)
    verifier = context.spec.verifier
    assert isinstance(verifier, OutcomeVerifier)
    return OutcomeNodeScorer(scorer, head, BudgetedReader(context.ledger, model), verifier.reads)


class OutcomeNodeScorer:
    """A ``NodeScorer`` for finished solutions. ``head`` estimates the tokens that are read beside the solution."""

    def __init__(self, scorer: OutcomeScorer, head: int, reader: BudgetedReader, reads: Reads) -> None:
        self._scorer = scorer
        self._head = head
        self._reader = reader
        self._reads = reads

    def scorable(self, node: Node) -> bool:
        return node.reason in ("answer", "stop") and bool(node.read_text(self._reads).strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        estimates = {
            node: self._head + sum(part.count_tokens(self._reads) for part in node.lineage()) + ESTIMATE_SLACK_TOKENS
            for node in nodes
        }
        return [
            self._score(node, reading, reserved)
            for node, reading, reserved in await self._reader.read(estimates, self._ask_scorer)
        ]

    def _score(self, node: Node, reading: VerifierScores, reserved: Amount) -> NodeScore:
        spend = self._reader.spend(reading)
        if reading.unread is not None:
            return without_verdict(node, reading, spend, reserved)
        return NodeScore(node, aggregate_score(reading.scores or (), "last"), steps=(), spend=spend, reserved=reserved)

    async def _ask_scorer(self, nodes: Sequence[Node], bound: int | None) -> Sequence[VerifierScores]:
        return await self._scorer.score([node.read_text(self._reads) for node in nodes], max_compute=bound)
