"""The interface between verifiers and a search, and the budget of model verifiers.

A verifier is opened for one job and its ledger (``reasoner.verifiers``). Journal, replay, bill and tree are handled by
the search.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from engine.protocol.request_checks import PromptTooLong
from engine.protocol.types import InvalidRequest, ModelInfo
from prm.scorers.steps import VerifierScores, aggregate
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.deadline import run_within
from reasoner.tree import Node


@dataclass(frozen=True, slots=True)
class NodeScore:
    """A node's score and its cost."""

    node: Node
    score: float | None
    """Score of the solution up to and with this node; ``None`` if the verifier gave no verdict, and never will."""
    steps: tuple[float, ...] = ()
    """Scores of the steps that the node added; empty for verifiers of whole solutions."""
    spend: Usage = field(default_factory=Usage)
    reserved: Amount = NO_AMOUNT
    """Budget that the scorer reserved for it, not committed yet."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its journal entry, such as critiques."""


class NodeScorer(Protocol):
    """A verifier opened for one job."""

    def scorable(self, node: Node) -> bool:
        """Return True if the node can get a (new) score: it has text of its own that ends at a step's end."""
        ...

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        """Score the first of these scorable nodes, as many as the budget reaches; may return an empty list.

        The reservations are passed on in ``NodeScore``; if an error is raised, all are released. Nodes that are left
        out are passed again. A verifier that computes no tokens needs no reservation.
        """
        ...


@dataclass(frozen=True, slots=True)
class PairScore:
    """The verdict on two solutions and its cost."""

    pair: tuple[Node, Node]
    score: float | None
    """Probability that the first is better; ``None`` if the verifier gave no verdict, and never will."""
    spend: Usage = field(default_factory=Usage)
    reserved: Amount = NO_AMOUNT
    details: Mapping[str, Any] = field(default_factory=dict)


class PairScorer(Protocol):
    """A verifier that compares solutions, opened for one job."""

    async def compare(self, pairs: Sequence[tuple[Node, Node]]) -> list[PairScore]:
        """Compare the first of these pairs, as many as the budget reaches; may return an empty list.

        Reservations are passed on as by ``NodeScorer.score``, and pairs that are left out are passed again.
        """
        ...


def without_verdict(node: Node, reading: VerifierScores, spend: Usage, reserved: Amount) -> NodeScore:
    """Return the score of a node on which the verifier gave no verdict, with what it said instead."""
    verdict = {"score": None, "votes": [None], "critiques": [reading.unread or ""]}
    return NodeScore(node, None, steps=(), spend=spend, reserved=reserved, details={"verdicts": [[verdict]]})


def inherited_scores(node: Node) -> tuple[float, ...]:
    """Return the step scores of the nearest scored ancestor in the node's conversation, from the first step on."""
    return next((ancestor.scores for ancestor in reversed(node.lineage()[:-1]) if ancestor.scores), ())


def ends_at_step(node: Node) -> bool:
    """Return True if the node's text ends at the end of a step and was not cut by a limit."""
    return node.reason in ("step", "answer", "stop")


def aggregate_score(steps: Sequence[float], aggregation: str) -> float:
    """Return one number for the scores of steps.

    A solution without scores, since it was too long for the verifier from the start, counts as wrong; one that became
    too long keeps its score.
    """
    return aggregate(steps, aggregation) if steps else 0.0


def check_fits_context(model: ModelInfo, tokens: int) -> None:
    """Raise ``PromptTooLong`` if the question alone is too long for a verifier."""
    if tokens >= model.context:
        raise PromptTooLong(
            f"the problem has {tokens} tokens, and the context of verifier {model.id!r} holds {model.context}",
            "problem",
        )


T = TypeVar("T")
ReadItems = Callable[[Sequence[T], int | None], Awaitable[Sequence[VerifierScores]]]
"""Function that reads nodes, or questions about them, and computes at most the given number of tokens for each."""
TOO_LONG = "items.parts"
"""Field in the engine's error if an item does not fit into the model's context."""


class BudgetedReader:
    """Reads nodes with a model within a ledger: each request limits the tokens that the engine may compute.

    The cost is first estimated for a warm cache. If fewer tokens are cached, the engine refuses and returns the true
    cost, with which the node is read again. A node that is too long for the model's context has no scores. Instead of
    nodes there may be items of another type, such as questions about them.
    """

    def __init__(self, ledger: Ledger, model: ModelInfo) -> None:
        self._ledger = ledger
        self._rate = ledger.rate_of_model(model)

    async def read(
        self, estimates: Mapping[T, int], read_items: ReadItems[T]
    ) -> list[tuple[T, VerifierScores, Amount]]:
        """Return readings of the first items, each with its reservation.

        Empty if the budget reaches none, or the time is up before the model has answered.
        """
        costs = dict(estimates)
        while True:
            batch, bound = self._select_affordable(costs)
            if not batch:
                return []
            amount = self._rate.verification_amount(bound)
            self._ledger.reserve(amount * len(batch))
            try:
                limit = bound if self._ledger.has_limits else None
                readings = await run_within(
                    self._ledger.seconds_until_cut(), partial(_read_each, read_items, batch, limit)
                )
            except BaseException:
                self._ledger.release(amount * len(batch))
                raise
            if readings is None:  # the engine cancels a request whose connection is closed
                self._ledger.release(amount * len(batch))
                return []
            answered = []
            for item, reading in zip(batch, readings, strict=True):
                if reading.scores is None:
                    costs[item] = reading.computed
                    self._ledger.release(amount)
                else:
                    answered.append((item, reading, amount))
            if answered:
                return answered

    async def score_steps(
        self, estimates: Mapping[Node, int], read_nodes: ReadItems[Node], aggregation: str
    ) -> list[NodeScore]:
        """Read the steps that nodes add; each score is over all steps up to the node."""
        scored = []
        for node, reading, reserved in await self.read(estimates, read_nodes):
            if reading.unread is not None:
                scored.append(without_verdict(node, reading, self.spend(reading), reserved))
                continue
            steps = reading.scores or ()
            score = aggregate_score(inherited_scores(node) + steps, aggregation)
            scored.append(NodeScore(node, score, steps=steps, spend=self.spend(reading), reserved=reserved))
        return scored

    def spend(self, reading: VerifierScores) -> Usage:
        """Return the cost of a reading."""
        return self._rate.verification_usage(reading.computed, reading.cached)

    def _select_affordable(self, costs: Mapping[T, int]) -> tuple[list[T], int]:
        """Return the first items, as many as the budget reaches, and the token limit for each of them."""
        batch: list[T] = []
        bound = 0
        most = 0 if self._ledger.is_exhausted else self._ledger.max_affordable(self._rate.verification_amount(1))
        for item, tokens in costs.items():
            if max(bound, tokens) * (len(batch) + 1) > most:
                break
            bound = max(bound, tokens)
            batch.append(item)
        return batch, bound


async def _read_each(read_items: ReadItems[T], items: Sequence[T], limit: int | None) -> Sequence[VerifierScores]:
    """Return a reading of each item. If the engine refuses a request, because one item is too long or for a reason of
    its server's, they are read singly, and those that are refused have no verdict.
    """
    try:
        return await read_items(items, limit)
    except InvalidRequest as error:
        if error.field == "model":
            raise
        if len(items) == 1:
            return [VerifierScores((), 0, 0, None if error.field == TOO_LONG else str(error))]
    return [reading for item in items for reading in await _read_each(read_items, [item], limit)]
