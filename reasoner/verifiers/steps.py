"""A process reward model as a verifier: each node's new steps are computed on the cached prefix of its parent."""

from __future__ import annotations

from collections.abc import Sequence

from prm.formats.base import Prompt
from prm.scorers.steps import StepChain, StepScorer, VerifierScores
from reasoner.jobs.verifier_specs import PrmVerifier
from reasoner.search.scoring import (
    BudgetedReader,
    NodeScore,
    NodeScorer,
    check_fits_context,
    ends_at_step,
    inherited_scores,
)
from reasoner.tree import Node, Reads
from reasoner.verifiers.context import VerifierContext, estimate_new_tokens


async def open_prm(context: VerifierContext) -> NodeScorer:
    """Open a process reward model. Raises ``InvalidRequest`` if it is not served, ``EngineError`` if it is none."""
    verifier = context.spec.verifier
    assert isinstance(verifier, PrmVerifier)
    model = context.verifier_model()
    scorer = StepScorer(context.engine, model, context.pin_key)
    prompt = await scorer.encode_question(context.spec.rendered_conversation)
    check_fits_context(model, prompt.size)
    return PrmNodeScorer(
        scorer,
        prompt,
        reader=BudgetedReader(context.ledger, model),
        aggregation=verifier.aggregation,
        reads=verifier.reads,
    )


class PrmNodeScorer:
    """A ``NodeScorer``. A node that ends within a step is scored up to its last whole step."""

    def __init__(
        self, scorer: StepScorer, prompt: Prompt, reader: BudgetedReader, aggregation: str, reads: Reads
    ) -> None:
        self._scorer = scorer
        self._prompt = prompt
        self._reader = reader
        self._aggregation = aggregation
        self._reads = reads

    def scorable(self, node: Node) -> bool:
        chain = self._build_chain(node)
        return len(chain.steps) > chain.scored

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        estimates = {node: estimate_new_tokens(node, self._prompt.size, self._reads) for node in nodes}
        return await self._reader.score_steps(estimates, self._ask_scorer, self._aggregation)

    async def _ask_scorer(self, nodes: Sequence[Node], bound: int | None) -> Sequence[VerifierScores]:
        return await self._scorer.score(self._prompt, [self._build_chain(node) for node in nodes], max_compute=bound)

    def _build_chain(self, node: Node) -> StepChain:
        steps = self._scorer.steps(node.read_text(self._reads), complete=ends_at_step(node))
        return StepChain(steps, len(node.scores or inherited_scores(node)))
