"""Monte-Carlo tree search: PUCT over steps, with the verifier's scores as values.

Sources: Silver et al. 2017, "Mastering the game of Go without human knowledge", methods (PUCT, virtual loss); Couëtoux
et al. 2011, "Continuous Upper Confidence Trees" (progressive widening: the number of children grows with the visits).

At each node the search chooses between the existing children and sampling another step. The prior of a child is the
policy's probability of its step, and that of another sample is the remaining probability, so a nearly certain step is
not sampled again. The value of another sample is the mean value of the children times the probability that the sample
is new. Equal steps are one child. Below the root, further samples of a node wait for the first one, from which the
remaining probability is computed. Values are min-max normalised over all scores so far (Schrittwieser et al. 2020,
"Mastering Atari, Go, chess and shogi by planning with a learned model", appendix B), so that small differences count
if all scores are close.

Several simulations run concurrently. Each counts as a visit without value until it ends (virtual loss), so that they
diverge. The tree depends on the order in which they end; a replay takes it from the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from engine.protocol.types import Capability
from reasoner.search.search import Search
from reasoner.search.stream import Stream
from reasoner.strategies.base import (
    MIN_NEW_PROBABILITY,
    Choice,
    Params,
    Samples,
    Steps,
    Strategy,
    VerifierUse,
    choose_best_scored,
)
from reasoner.tree import Node


class Mcts(Params):
    n: Samples = 16
    draws: Annotated[int, Field(ge=1, le=64, description="Simulations for each of the n; each draws one step.")] = 4
    exploration: Annotated[float, Field(ge=0, le=100, description="Weight of the prior against the value (c).")] = 0.5
    value: Annotated[
        Literal["verifier", "rollout"],
        Field(description="A step's worth: the verifier's score of it, or of a solution completed from it."),
    ] = "verifier"
    in_flight: Annotated[int, Field(ge=1, le=256, description="Simulations at once.")] = 4
    max_steps: Steps = 40


@dataclass(slots=True)
class ValueNormalizer:
    """Min-max normalisation of values to [0, 1] by the range so far."""

    low: float = 1.0
    high: float = 0.0

    def update(self, value: float) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)

    def normalize(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else value


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node of the search tree with its visit statistics."""

    node: Node
    parent: TreeNode | None = None
    prior: float = 1.0
    """Probability of the node's step under the policy."""
    visits: int = 0
    """Number of simulations through the node, including those in flight."""
    total: float = 0.0
    """Sum of the values of finished simulations."""
    samples: int = 0
    """Number of steps sampled at this node."""
    in_flight: int = 0
    """Number of ``samples`` that have not arrived yet."""
    children: dict[str, TreeNode] = field(default_factory=dict)
    """Children by text."""
    is_exhausted: bool = False
    """True if the subtree cannot be extended any further."""

    def ancestors(self) -> Iterator[TreeNode]:
        """Yield this node and those above it, up to the root."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def add_visits(self, count: int) -> None:
        for node in self.ancestors():
            node.visits += count

    def add_value(self, value: float) -> None:
        for node in self.ancestors():
            node.total += value

    def descend(self, exploration: float, values: ValueNormalizer) -> TreeNode | None:
        """Return the node at which to sample the next step, here or below.

        ``None`` if nothing can be sampled, at all or before a sample in flight has arrived.
        """
        waiting: set[TreeNode] = set()
        while not self.is_exhausted:
            exploration_bonus = exploration * math.sqrt(self.visits + 1)
            means = {child: values.normalize(child.total / child.visits) for child in self.children.values()}
            options = [
                (mean + exploration_bonus * child.prior / (1 + child.visits), child)
                for child, mean in means.items()
                if not child.is_exhausted and child not in waiting
            ]
            left = 1.0 - sum(child.prior for child in means)
            if left >= MIN_NEW_PROBABILITY if means else self.parent is None or not self.in_flight:
                average = sum(means.values()) / max(1, len(means))
                options.append((left * average + exploration_bonus * left / (1 + self.samples), self))
            if not options:
                self.is_exhausted = not self.in_flight and not waiting
                break
            best = max(options, key=lambda option: option[0])[1]  # ties go to the oldest
            selected = self if best is self else best.descend(exploration, values)
            if selected is not None:
                return selected
            waiting.add(best)
        return None


class TreeSearch:
    """The tree of one search and its simulations in flight."""

    def __init__(self, search: Search, params: Mcts, stream: Stream) -> None:
        self._search = search
        self._params = params
        self._stream = stream
        self._values = ValueNormalizer()
        self._root = TreeNode(search.root)
        self._nodes = {search.root.path: self._root}
        self._rollouts: dict[tuple[int, ...], TreeNode] = {}
        """Nodes that wait for the value of a rollout, by the rollout's path."""
        self._simulations_left = params.n * params.draws
        self._running = 0

    def start_simulations(self) -> None:
        """Sample steps until enough simulations are in flight or nothing can be sampled now."""
        while self._running < self._params.in_flight and self._simulations_left > 0:
            node = self._root.descend(self._params.exploration, self._values)
            if node is None:
                return
            node.samples += 1
            if self._stream.expand([node.node], 1) == 0:  # the context is full
                node.is_exhausted = True
                continue
            node.in_flight += 1
            node.add_visits(1)
            self._simulations_left -= 1
            self._running += 1

    async def add(self, arrived: Sequence[Node]) -> None:
        """Add steps to the tree, and end the simulations whose value is known."""
        ended: dict[Node, TreeNode] = {}
        for node in sorted(arrived, key=lambda node: node.path):
            child = self._rollouts.get(node.path) or await self._add_child(node)
            if child is not None:
                ended[node] = child
        await self._search.score(list(ended))
        for node, child in ended.items():
            value = node.score or 0.0
            self._running -= 1
            self._values.update(value)
            child.add_value(value)

    async def _add_child(self, node: Node) -> TreeNode | None:
        """Add a sampled step; return its tree node if the step's own score is the simulation's value."""
        parent = self._nodes[node.path[:-1]]
        parent.in_flight -= 1
        if node.text in parent.children:
            self._running -= 1
            parent.add_visits(-1)
            await self._search.prune([node] if node.open else [])
            return None
        child = TreeNode(node, parent, math.exp(node.logprob), 1)
        parent.children[node.text] = self._nodes[node.path] = child
        child.is_exhausted = not node.open or len(node.path) >= self._params.max_steps
        if self._params.value == "rollout" and node.open and self._stream.complete([node], 1):
            self._rollouts[*node.path, 0] = child
            return None
        return child


async def run(search: Search, params: Mcts) -> Choice:
    """Sample n * draws steps at the nodes with the highest PUCT score; the best-scored finished solution wins."""
    async with search.stream() as stream:
        tree = TreeSearch(search, params, stream)
        tree.start_simulations()
        while arrived := await anext(stream, list[Node]()):
            await tree.add(arrived)
            tree.start_simulations()
    return choose_best_scored(await search.ensure_candidates())


STRATEGY = Strategy("mcts", Mcts, run, VerifierUse.SCORES, requires={Capability.CONTINUATION})
