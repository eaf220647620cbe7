"""A probe as a verifier: the policy's own hidden states say how likely a solution is to end right.

The engine reads them while it decodes (``Completion.probe``), so a score costs no token: FLOPs of a small head alone.
Where a node has no such score, because the policy is served elsewhere or the journal is older, one scoring pass over
the node computes it, which the bill says like that of any verifier.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from engine.protocol.types import InvalidRequest, ModelInfo, ScoreItem, ScoreRequest
from prm.scorers.steps import VerifierScores, read_scores
from reasoner.base_model import VerifierSpec
from reasoner.budget.prices import Amount
from reasoner.budget.usage import Usage
from reasoner.jobs.verifier_specs import ProbeVerifier
from reasoner.search.scoring import (
    BudgetedReader,
    NodeScore,
    NodeScorer,
    aggregate_score,
    ends_at_step,
    inherited_scores,
)
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext, estimate_new_tokens

_FLOPS_PER_WEIGHT = 2


async def open_probe(context: VerifierContext) -> NodeScorer:
    """Open the probe of a served model. Raises ``InvalidRequest`` if it has none, or is another model's."""
    verifier, policy = context.spec.verifier, context.policy
    assert isinstance(verifier, ProbeVerifier)
    model = context.verifier_model()
    if model.fingerprint and policy.fingerprint and model.fingerprint != policy.fingerprint:
        raise InvalidRequest(
            f"the probe of {model.id!r} was fitted on that model's own states, and {policy.id!r} has other weights: "
            f"fit a probe for {policy.id!r} with 'reasoner prm train --probe'",
            "verifier.model",
        )
    if policy.vocab_size and model.vocab_size != policy.vocab_size:
        raise InvalidRequest(
            f"model {model.id!r} has a vocabulary of {model.vocab_size} tokens and {policy.id!r} of "
            f"{policy.vocab_size}: a probe scores solutions of its own model",
            "verifier.model",
        )
    return ProbeNodeScorer(context, model, verifier.aggregation)


def reads_while_decoding(verifier: VerifierSpec | None, policy: ModelInfo) -> bool:
    """Return True if the job's branches are to report scores of the policy's own probe."""
    return isinstance(verifier, ProbeVerifier) and policy.probe is not None and verifier.model in (None, policy.id)


class ProbeNodeScorer:
    """A ``NodeScorer`` for nodes whose text ends where a step does: one score for each node."""

    def __init__(self, context: VerifierContext, model: ModelInfo, aggregation: str) -> None:
        self._context = context
        self._model = model
        self._aggregation = aggregation
        self._reader = BudgetedReader(context.ledger, model)
        assert model.probe is not None
        self._flops = _FLOPS_PER_WEIGHT * model.probe.parameters

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip())

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        amount, ledger = Amount(flops=self._flops), self._context.ledger
        decoded = [node for node in nodes if node.probe is not None]
        decoded = decoded[: max(0, ledger.max_affordable(amount, may_use_answer_reserve=True))]
        ledger.reserve(amount * len(decoded))
        if decoded:
            return [self._decoded_score(node, amount) for node in decoded]
        others = [node for node in nodes if node.probe is None]
        estimates = {node: estimate_new_tokens(node, len(node.prefix) - node.depth_tokens, "all") for node in others}
        return await self._reader.score_steps(estimates, self._read_states, self._aggregation)

    def _decoded_score(self, node: Node, reserved: Amount) -> NodeScore:
        assert node.probe is not None
        score = aggregate_score((*inherited_scores(node), node.probe), self._aggregation)
        return NodeScore(node, score, steps=(node.probe,), spend=Usage(flops=float(self._flops)), reserved=reserved)

    async def _read_states(self, nodes: Sequence[Node], bound: int | None) -> Sequence[VerifierScores]:
        """Read the state that predicted each node's last token, as decoding does."""
        context = self._context
        items = tuple(
            ScoreItem((node.prefix[:-1],), (0,), context.find_branch_bound(node, self._model)) for node in nodes
        )
        pin_key = context.pin_key
        request = ScoreRequest(
            uuid.uuid4().hex, self._model.id, items=items, token_ids=(), max_compute=bound, pin_key=pin_key, probe=True
        )
        return await read_scores(context.engine, request, lambda values: values[0])
