"""Lookahead search: beam search in which the value of a step is the score at the end of a rollout from it.

Source: Snell et al. 2024, "Scaling LLM Test-Time Compute Optimally", section 5.2: each sampled step is continued
greedily for k steps, and the verifier's score at the end of that rollout is its value. ``beam`` is the case k = 0.

Rollouts are independent of each other. One that reaches the end of a solution is a candidate; the others are pruned. If
the budget ends during a step's rollout, its value is the last score reached.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Strategy, VerifierUse
from reasoner.strategies.tree.beam import Beam, beam_search
from reasoner.tree import Node


class Lookahead(Beam):
    lookahead: Annotated[int, Field(ge=1, le=64, description="Steps that a roll-out looks ahead (k).")] = 1


async def run(search: Search, params: Lookahead) -> Choice:
    """Beam search in which a step's value is the verifier's score after k more greedy steps."""

    async def look_ahead(rivals: list[Node]) -> dict[Node, float]:
        values = {node: node.score for node in rivals if node.score is not None}
        origin = {node.path: node for node in values}
        async with search.stream() as stream:
            stream.expand([node for node in values if node.open], 1, greedy=True)
            async for arrived in stream:
                await search.score(arrived)
                for node in arrived:
                    depth = next(k for k in range(len(node.path)) if node.path[: len(node.path) - k] in origin)
                    if node.score is not None:
                        values[origin[node.path[: len(node.path) - depth]]] = node.score
                    if node.open and node.score is not None and depth < params.lookahead:
                        stream.expand([node], 1, greedy=True)
                    else:
                        await search.prune([node] if node.open else [])
        return values

    return await beam_search(search, params, look_ahead)


STRATEGY = Strategy("lookahead", Lookahead, run, VerifierUse.STEP_SCORES)
