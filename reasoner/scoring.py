"""Verifier scores within the budget: a request says how many tokens it may compute, and the engine holds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prm.scorer import Chain, ChainScore, StepScorer
from reasoner.budget import Ledger
from reasoner.jobs import Usage
from reasoner.tree import Node

SLACK = 16
"""Tokens by which an estimate may be short: separators, and the part of a cached prefix that is read again."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A node's new step scores and what they cost."""

    node: Node
    scores: tuple[float, ...]
    spend: Usage
    promise: int


class BudgetedScorer:
    """Scores the nodes of one job against its ledger."""

    def __init__(self, scorer: StepScorer, ledger: Ledger, prompt: tuple[int, ...]) -> None:
        self._scorer = scorer
        self._ledger = ledger
        self._prompt = prompt

    def chain(self, node: Node) -> Chain:
        """The node's steps, and how many of them an ancestor's score covers."""
        known: Node | None = node
        while known is not None and not known.scores:
            known = known.parent
        complete = node.reason in ("step", "answer", "stop")
        return Chain(self._scorer.steps(node.solution, complete=complete), 0 if known is None else len(known.scores))

    def unscored_steps(self, node: Node) -> int:
        """How many steps a score for this node would add. A node without text of its own adds none."""
        chain = self.chain(node)
        return len(chain.steps) - chain.scored

    async def score(self, nodes: Sequence[Node]) -> list[Scored]:
        """Scores as many of the nodes, in order, as the budget reaches; each has at least one unscored step.

        The estimate of a cost is what a warm cache leaves to compute. Where the cache is colder the engine refuses
        and names the true number, and the node is asked for again with that.
        """
        cost = {node: self._estimate(node) for node in nodes}
        while True:
            batch, bound = self._affordable(nodes, cost)
            if not batch:
                return []
            self._ledger.reserve(bound * len(batch))
            try:
                limit = None if self._ledger.budget.tokens is None else bound
                results = await self._scorer.score(
                    self._prompt, [self.chain(node) for node in batch], max_compute=limit
                )
            except BaseException:
                self._ledger.release(bound * len(batch))
                raise
            scored = []
            for node, result in zip(batch, results, strict=True):
                if result.scores is None:
                    cost[node] = result.computed
                    self._ledger.release(bound)
                else:
                    scored.append(Scored(node, result.scores, self._spend(result), bound))
            if scored:
                return scored

    def _affordable(self, nodes: Sequence[Node], cost: dict[Node, int]) -> tuple[list[Node], int]:
        """The longest head of the nodes that fits into what is left, and the bound for each of them."""
        batch: list[Node] = []
        bound = 0
        for node in nodes:
            if max(bound, cost[node]) * (len(batch) + 1) > self._ledger.available() or self._ledger.exhausted:
                break
            bound = max(bound, cost[node])
            batch.append(node)
        return batch, bound

    def _estimate(self, node: Node) -> int:
        tokens = SLACK
        known: Node | None = node
        while known is not None and not known.scores:
            tokens += known.tokens + 1
            known = known.parent
        return tokens if known is not None else tokens + len(self._prompt)

    def _spend(self, result: ChainScore) -> Usage:
        return Usage(
            verifier_computed=result.computed,
            verifier_cached=result.cached,
            flops=2.0 * self._scorer.info.parameters * result.computed,
        )
