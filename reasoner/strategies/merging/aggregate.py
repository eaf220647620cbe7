"""Recursive self-aggregation: each solution of a round is written from several of the round before.

Source: Venkatraman et al. 2025, "Recursive Self-Aggregation Unlocks Deep Thinking in Large Language Models",
arXiv:2509.26626, section 3. Groups differ in one point: a solution is always written from its own predecessor and from
k - 1 others of the round at random. So the n chains stay apart in the tree, no solution is lost, and a group can be
written as soon as its own members have ended.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Annotated, Literal

from pydantic import Field

from engine.protocol.types import InvalidRequest
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.search.stream import Stream
from reasoner.strategies.base import (
    Choice,
    DecidedBy,
    Params,
    Strategy,
    VerifierUse,
    choose_best_scored,
    choose_by_majority,
)
from reasoner.strategies.merging.prompts import MergingPrompt, OptionalTemplate
from reasoner.tree import Node


class Aggregate(Params):
    n: Annotated[int, Field(ge=2, le=MAX_N, description="Solutions of a round.")] = 8
    k: Annotated[int, Field(ge=1, le=64, description="Solutions that each new one is written from.")] = 3
    rounds: Annotated[int, Field(ge=1, le=32, description="Rounds of merging after the first solutions.")] = 2
    by: Annotated[
        Literal["majority", "verifier"],
        Field(description="What chooses in the last round: a vote, or the verifier, which then scores each solution."),
    ] = "majority"
    template: OptionalTemplate = None


async def run(search: Search, params: Aggregate) -> Choice:
    """Sample n solutions and rewrite each from k of them, for some rounds; the last round votes or is judged.

    If the budget ends the search earlier, the newest answer of each chain counts.
    """
    if params.by == "verifier" and not search.has_verifier:
        raise InvalidRequest("there is no verifier to choose: give 'by' as 'majority'", "strategy.by")
    async with search.stream() as stream:
        population = _Population(search, params, stream)
        stream.complete([search.root], params.n)
        async for nodes in stream:
            if params.by == "verifier":
                await search.score([node for node in nodes if node.answer is not None])
            await population.add(nodes)
    candidates = select_candidates(population.newest_answers(), search.spec)
    if params.by == "verifier":
        return choose_best_scored(candidates)
    return await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0), population.newest())


class _Population:
    """The chains of solutions, by the index of their first one, and the groups that are still to be written."""

    def __init__(self, search: Search, params: Aggregate, stream: Stream) -> None:
        self._search = search
        self._params = params
        self._stream = stream
        self._prompt = MergingPrompt(search, "aggregate", params.template)
        self._chains: dict[int, list[Node]] = defaultdict(list)
        self._groups = [self._choose_groups(number) for number in range(params.rounds)]

    async def add(self, nodes: list[Node]) -> None:
        """Add solutions that have ended, and start those whose groups are complete."""
        waiting = deque(nodes)
        while waiting:
            node = waiting.popleft()
            own = self._chains[node.path[0]]
            own.append(node)
            if len(own) > self._params.rounds:
                continue
            number = len(own) - 1
            for group in self._groups[number]:
                if node.path[0] in group and all(len(self._chains[member]) > number for member in group):
                    members = [self._chains[member][number] for member in group]
                    if not await self._write(members):  # no text fits: the chain goes on with the solution that it has
                        waiting.append(members[0])

    def newest(self) -> list[Node]:
        """Return the solution of each chain that may vote: the last one that states an answer, else the last one."""
        chains = [chain for chain in self._chains.values() if chain]
        return [next((node for node in chain[::-1] if node.answer is not None), chain[-1]) for chain in chains]

    def newest_answers(self) -> list[Node]:
        """Return the last solution of each chain that states an answer."""
        answered = [[node for node in chain if node.answer is not None] for chain in self._chains.values()]
        return [chain[-1] for chain in answered if chain]

    def _choose_groups(self, number: int) -> list[list[int]]:
        """Return for each chain the chains from whose solutions its next one is written, its own first."""
        rng, chains = self._search.rng(self._search.root, f"groups/{number}"), range(self._params.n)
        size = min(self._params.k, self._params.n) - 1
        return [[chain, *rng.sample([other for other in chains if other != chain], size)] for chain in chains]

    async def _write(self, group: list[Node]) -> bool:
        """Start the solution that is written from a group; return False if none of the group can be shown."""
        started = await self._prompt.start(group[0], group)
        if started is None:
            return False
        node, shown = started
        await self._search.record_decision(f"group:{node.id}", {"shown": [member.id for member in shown]})
        self._stream.complete([node], 1)
        return True


STRATEGY = Strategy("aggregate", Aggregate, run=run, verifier=VerifierUse.OPTIONAL, decided_by=DecidedBy.VOTE)
