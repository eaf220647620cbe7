"""What a search asks of a verifier, whichever kind it is, and how one that is a model stays within the budget.

A verifier of a kind is opened for one job and its ledger (``reasoner.verifiers``). From then on it is a ``NodeScorer``:
which nodes it can say something new of, and their scores. Journal, replay, bill and tree are the search's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.protocol.types import InvalidRequest, ModelInfo
from prm.scorers.aggregate import aggregate
from prm.scorers.steps import Reading
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.deadline import run_within
from reasoner.tree import Node


@dataclass(frozen=True, slots=True)
class Scored:
    """A node's score and what it cost. ``promise`` is what its scorer reserved for it and nobody settled yet."""

    node: Node
    score: float
    """Of the solution up to and with this node."""
    steps: tuple[float, ...] = ()
    """Of the steps that the node added; empty where a verifier judges solutions as a whole."""
    spend: Usage = field(default_factory=Usage)
    promise: Amount = NO_AMOUNT


class NodeScorer(Protocol):
    """A verifier at work on one job."""

    def scorable(self, node: Node) -> bool:
        """Whether it can give the node a score. No node gets one for half a step, or for no text of its own."""
        ...

    async def score(self, nodes: Sequence[Node]) -> list[Scored]:
        """Scores as many of these scorable nodes, in order, as the budget reaches; none when it reaches none.

        It reserves what it may spend and hands the promises over in ``Scored``; when it raises, all are released. Nodes
        that it leaves out are asked for again. A verifier that computes no tokens needs no promise.
        """
        ...


def known_steps(node: Node) -> tuple[float, ...]:
    """The step scores of the node's nearest ancestor in its conversation that has any, from the first step on."""
    return next((ancestor.scores for ancestor in reversed(node.lineage()[:-1]) if ancestor.scores), ())


def finished_step(node: Node) -> bool:
    """Whether the node's text ends where a step does, not where a limit cut it."""
    return node.reason in ("step", "answer", "stop")


def score_of(steps: Sequence[float], aggregation: str) -> float:
    """One number for the scores of steps. A solution of which a verifier could read nothing, since it is too long for
    it, counts as wrong; one that outgrew it keeps the score that it had."""
    return aggregate(steps, aggregation) if steps else 0.0


def fits_context(model: ModelInfo, tokens: int) -> None:
    """Raises ``InvalidRequest`` when the question alone is too long for a verifier."""
    if tokens >= model.context:
        raise InvalidRequest(
            f"the problem has {tokens} tokens, and the context of verifier {model.id!r} holds {model.context}",
            "problem",
        )


ReadNodes = Callable[[Sequence[Node], int | None], Awaitable[Sequence[Reading]]]
"""Reads nodes, for at most so many computed tokens of each."""
TOO_LONG = "items.parts"
"""The field that an engine names when an item does not fit into the model's context."""


class BudgetedReader:
    """Asks a model about nodes within a ledger: a request says how many tokens it may compute, and the engine obeys.

    The estimate of a cost is what a warm cache leaves to compute. Where the cache is colder the engine refuses and
    names the true number, and the node is asked for again with that. What is too long for the model's context has no
    scores in its reading.
    """

    def __init__(self, ledger: Ledger, model: ModelInfo) -> None:
        self._ledger = ledger
        self._rate = ledger.rate_of_model(model)

    async def read(
        self,
        estimates: Mapping[Node, int],
        ask: ReadNodes,
    ) -> list[tuple[Node, Reading, Amount]]:
        """Return the model's scores of a head of the nodes, with the promise of each.

        Nothing when the budget reaches none, or its time is up before the model has answered.

        ``ask(nodes, bound)`` answers a reading of each node for at most ``bound`` tokens of each.
        """
        cost = dict(estimates)
        while True:
            batch, bound = self._affordable(cost)
            if not batch:
                return []
            promise = self._rate.verification_amount(bound)
            self._ledger.reserve(promise * len(batch))
            try:
                most = bound if self._ledger.has_limits else None
                readings = await run_within(self._ledger.seconds_until_cut(), partial(_each, ask, batch, most))
            except BaseException:
                self._ledger.release(promise * len(batch))
                raise
            if readings is None:  # the engine stops computing when nobody waits for it any more
                self._ledger.release(promise * len(batch))
                return []
            answered = []
            for node, reading in zip(batch, readings, strict=True):
                if reading.scores is None:
                    cost[node] = reading.computed
                    self._ledger.release(promise)
                else:
                    answered.append((node, reading, promise))
            if answered:
                return answered

    async def score_steps(
        self,
        estimates: Mapping[Node, int],
        ask: Callable[[Sequence[Node], int | None], Awaitable[Sequence[Reading]]],
        aggregation: str,
    ) -> list[Scored]:
        """``read``, where a reading is of the steps that a node adds: each score is over all steps up to the node."""
        scored = []
        for node, reading, promise in await self.read(estimates, ask):
            steps = reading.scores or ()
            score = score_of(known_steps(node) + steps, aggregation)
            scored.append(Scored(node, score, steps, self.spend(reading), promise))
        return scored

    def spend(self, reading: Reading) -> Usage:
        """What a reading adds to the bill."""
        return self._rate.verification_usage(reading.computed, reading.cached)

    def _affordable(self, cost: Mapping[Node, int]) -> tuple[list[Node], int]:
        """The longest head of the nodes that fits into what is left, and the bound for each of them."""
        batch: list[Node] = []
        bound = 0
        most = 0 if self._ledger.is_exhausted else self._ledger.max_affordable(self._rate.verification_amount(1))
        for node, tokens in cost.items():
            if max(bound, tokens) * (len(batch) + 1) > most:
                break
            bound = max(bound, tokens)
            batch.append(node)
        return batch, bound


async def _each(read: ReadNodes, nodes: Sequence[Node], bound: int | None) -> Sequence[Reading]:
    """A reading of each node. A request that is refused since one of them is too long is made for each by itself."""
    try:
        return await read(nodes, bound)
    except InvalidRequest as error:
        if error.field != TOO_LONG:
            raise
    if len(nodes) == 1:
        return [Reading((), 0, 0)]
    return [reading for node in nodes for reading in await _each(read, [node], bound)]
