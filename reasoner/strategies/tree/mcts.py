"""Monte-Carlo tree search: PUCT over steps, with the verifier's scores as values.

Sources: Silver et al. 2017, "Mastering the game of Go without human knowledge", methods (PUCT, virtual loss); Couëtoux
et al. 2011, "Continuous Upper Confidence Trees" (the more often a node is visited, the more children are drawn).

At each node the search chooses among the steps that it has seen there and drawing another one. The prior of a step is
the policy's own probability of it, and that of another draw is the probability that is left: where the policy is
nearly certain, nothing is drawn again. Another draw is worth what the steps seen there are worth on average, by the
chance that it is a new one. Equal steps are one child. Below the root a node's first draw is waited for, since only it
tells what is left there. Values are compared on the scale from the lowest to the highest score so far (Schrittwieser
et al. 2020, "Mastering Atari, Go, chess and shogi by planning with a learned model", appendix B): where everything is
doubtful, small differences are all that there is.

Several simulations run at once. Each counts as a visit without value until it ends, so that they part ways. The order
in which they end decides how the tree grows; a replay takes it from the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from reasoner.answers.equivalence import Equivalence
from reasoner.search.search import Search
from reasoner.strategies.base import MIN_NEW_PROBABILITY, Choice, Params, Samples, Steps, Strategy, choose_best_scored
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
    """The lowest and the highest value so far."""

    low: float = 1.0
    high: float = 0.0

    def see(self, value: float) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)

    def of(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else value


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node with its statistics. ``total`` is the sum of the values of its ``visits``, ``prior`` its probability."""

    node: Node
    above: TreeNode | None = None
    prior: float = 1.0
    visits: int = 0
    total: float = 0.0
    draws: int = 0
    drawing: int = 0
    """Draws in flight."""
    below: dict[str, TreeNode] = field(default_factory=dict)
    closed: bool = False
    """Nothing is left to find here."""

    def line(self) -> Iterator[TreeNode]:
        """From here up to the root."""
        place: TreeNode | None = self
        while place is not None:
            yield place
            place = place.above

    def visit(self, count: int) -> None:
        for place in self.line():
            place.visits += count

    def descend(self, exploration: float, scale: ValueNormalizer) -> TreeNode | None:
        """Return where to draw the next step, here or below.

        ``None`` when there is nothing left, or nothing before a draw in flight has arrived.
        """
        waiting: set[TreeNode] = set()
        while not self.closed:
            urge = exploration * math.sqrt(self.visits + 1)
            worths = {child: scale.of(child.total / child.visits) for child in self.below.values()}
            options = [
                (worth + urge * child.prior / (1 + child.visits), child)
                for child, worth in worths.items()
                if not child.closed and child not in waiting
            ]
            left = 1.0 - sum(child.prior for child in worths)
            if left >= MIN_NEW_PROBABILITY if worths else self.above is None or not self.drawing:
                average = sum(worths.values()) / max(1, len(worths))
                options.append((left * average + urge * left / (1 + self.draws), self))
            if not options:
                self.closed = not self.drawing and not waiting
                break
            best = max(options, key=lambda option: option[0])[1]  # of equals the one that was seen first
            found = self if best is self else best.descend(exploration, scale)
            if found is not None:
                return found
            waiting.add(best)
        return None


async def run(search: Search, params: Mcts, equivalence: Equivalence) -> Choice:  # noqa: ARG001
    """Draws n * draws steps where value and prior promise most; the best-scored finished solution wins."""
    root, scale = TreeNode(search.root), ValueNormalizer()
    places, rollouts = {root.node.path: root}, dict[tuple[int, ...], TreeNode]()
    left, running, arrived = params.n * params.draws, 0, list[Node]()
    async with search.stream() as stream:
        while True:
            ended: dict[Node, TreeNode] = {}
            for node in sorted(arrived, key=lambda node: node.path):
                child = rollouts.get(node.path)
                if child is None:
                    above = places[node.path[:-1]]
                    above.drawing -= 1
                    if node.text in above.below:
                        running -= 1
                        above.visit(-1)
                        await search.prune([node] if node.open else [])
                        continue
                    child = above.below[node.text] = places[node.path] = TreeNode(
                        node, above, math.exp(node.logprob), 1
                    )
                    child.closed = not node.open or len(node.path) >= params.max_steps
                    if params.value == "rollout" and node.open and stream.complete([node], 1):
                        rollouts[*node.path, 0] = child
                        continue
                ended[node] = child
            await search.score(list(ended))
            for node, child in ended.items():
                running -= 1
                scale.see(node.score or 0.0)
                for passed in child.line():
                    passed.total += node.score or 0.0
            while running < params.in_flight and left > 0:
                place = root.descend(params.exploration, scale)
                if place is None:
                    break
                place.draws += 1
                if stream.expand([place.node], 1) == 0:  # the context is full
                    place.closed = True
                    continue
                place.drawing += 1
                place.visit(1)
                left, running = left - 1, running + 1
            arrived = await anext(stream, [])
            if not arrived:
                break
    return choose_best_scored(await search.ensure_candidates())


STRATEGY = Strategy("mcts", Mcts, run, needs_verifier=True)
