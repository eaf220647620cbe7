"""Adaptive branching: at each solution, Thompson sampling decides to widen, to deepen, and which model writes next.

Source: Inoue et al. 2025, "Wider or Deeper? Scaling LLM Inference-Time Compute with Adaptive Branching Tree Search",
arXiv:2503.04412: variant A with Beta posteriors (section 3.4), variant M with a mixed model (section 3.3), and several
models (section 4.3). Here a model's posterior is that of its scores anywhere in the tree, in both variants. And the
mixed model has one group for each choice: the scores of a solution's children for widening, and for deepening at a
child those of what was refined from it, so that a child's own score says nothing of its refinements.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from reasoner.confidence.thompson import draw_beta, draw_means
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Feature, Params, Strategy, VerifierUse, choose_best_scored, read_answer
from reasoner.strategies.sampling.revise import REQUEST
from reasoner.tree import Node


class AbMcts(Params):
    n: Annotated[int, Field(ge=1, le=MAX_N, description="Solutions in all, new ones and refined ones.")] = 16
    variant: Annotated[
        Literal["a", "m"],
        Field(description="Posteriors: a, a Beta distribution of each choice; m, a mixed model of its refinements."),
    ] = "a"
    parallel: Annotated[int, Field(ge=1, le=64, description="Solutions of a round, which are written at once.")] = 4
    request: Annotated[
        str, Field(min_length=1, max_length=2000, description="What is said to a solution that is refined.")
    ] = REQUEST


@dataclass(slots=True, eq=False)
class _Solution:
    """A solution with those refined from it; the root of all stands for the question."""

    node: Node | None = None
    score: float = 0.0
    children: list[_Solution] = field(default_factory=list)

    def walk(self) -> Iterator[_Solution]:
        yield self
        for child in self.children:
            yield from child.walk()

    def scores(self) -> list[float]:
        """Return the scores of this solution and of all that were refined from it."""
        return [solution.score for solution in self.walk()]


async def run(search: Search, params: AbMcts) -> Choice:
    """Decide before each of n solutions whether to begin anew or refine an earlier one, and with which model.

    Solutions are written in rounds, so that no choice depends on their speed. The first round begins anew.
    """
    tree = _Tree(search, params)
    async with search.stream() as stream:
        started = min(params.parallel, params.n)
        stream.complete(*search.spread(started))
        while not search.is_budget_exhausted:
            written: list[Node] = []
            async for nodes in stream:
                written += nodes
                await search.score([node for node in nodes if node.answer is not None])
                if search.spec.has_conclusive_verifier and any(node.score == 1.0 for node in nodes):
                    return choose_best_scored(search.candidates())
            tree.add(sorted(written, key=lambda node: node.path))
            count = min(params.parallel, params.n - started)
            if count <= 0:
                break
            for parent in await tree.choose(started, count):
                stream.complete([parent], 1)
            started += count
    return choose_best_scored(search.candidates())


class _Tree:
    """The solutions of one search, and the choices among them."""

    def __init__(self, search: Search, params: AbMcts) -> None:
        self._search = search
        self._params = params
        self._root = _Solution()
        self._solutions: dict[str, _Solution] = {}

    def add(self, nodes: list[Node]) -> None:
        """Add solutions that have ended; one without a score is worth nothing."""
        for node in nodes:
            conversation = node.parent
            refined = conversation.parent if conversation is not None and conversation.starts_conversation else None
            parent = self._root if refined is None else self._solutions.get(refined.id, self._root)
            solution = self._solutions[node.id] = _Solution(node, node.score or 0.0)
            parent.children.append(solution)

    async def choose(self, number: int, count: int) -> list[Node]:
        """Return the nodes at which the next solutions begin; ``number`` solutions were started before.

        The choices are recorded, since another machine rounds otherwise.
        """

        async def find() -> str:
            rng = self._search.rng(self._search.root, f"choose/{number}")
            chosen = [(self._choose_solution(rng).node, self._choose_policy(rng)) for _ in range(count)]
            return json.dumps([[node and node.id, policy] for node, policy in chosen])

        found = await self._search.record_result(f"choose:{number}", find)
        choices: list[tuple[str | None, int]] = json.loads(found or "[]")
        return [await self._start(self._solutions.get(name or ""), policy) for name, policy in choices]

    def _choose_solution(self, rng: random.Random) -> _Solution:
        """Return the solution to refine, or the root for a new one: from the root down, until widening is drawn."""
        at = self._root
        while at.children:
            own = [child.score for child in at.children]
            refined = [child.scores()[1:] for child in at.children]
            if self._params.variant == "m":
                new, *draws = draw_means([own, *refined], rng)
            else:
                new = draw_beta(own, rng)
                if new >= draw_beta([score for scores in refined for score in scores], rng):
                    return at
                draws, new = [draw_beta(child.scores(), rng) for child in at.children], -1.0
            best = max(range(len(draws)), key=draws.__getitem__)
            if new >= draws[best]:
                return at
            at = at.children[best]
        return at

    def _choose_policy(self, rng: random.Random) -> int:
        """Return the policy whose draw is the best, from the scores of all its solutions."""
        written = [solution for solution in self._root.walk() if solution.node is not None]
        draws = [
            draw_beta([solution.score for solution in written if solution.node and solution.node.policy == index], rng)
            for index in range(len(self._search.policies))
        ]
        return max(range(len(draws)), key=draws.__getitem__)

    async def _start(self, solution: _Solution | None, policy: int) -> Node:
        """Begin the conversation in which a policy refines a solution; one without room for that begins anew."""
        root, node = self._search.roots[policy], None if solution is None else solution.node
        if node is None or not (text := read_answer(node).strip()):
            return root
        messages = [
            *self._search.spec.to_messages(),
            {"role": "assistant", "content": text},
            {"role": "user", "content": self._params.request},
        ]
        context = self._search.policies[policy].model.context
        if len(await self._search.tokenize(messages, policy)) + node.depth_tokens > context:
            return root
        return await self._search.start_conversation(node, messages, policy=policy)


STRATEGY = Strategy("ab_mcts", AbMcts, run, VerifierUse.SCORES, supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS})
