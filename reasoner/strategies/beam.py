"""Beam search over steps, guided by a process reward model.

Source: Snell et al. 2024, "Scaling LLM Test-Time Compute Optimally", section 5.2: N samples of a step, keep the best
N / M by the verifier, expand each M times. A level is a barrier by definition: beams are compared with one another.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reasoner.equivalence import Equivalence
from reasoner.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Strategy, best_scored
from reasoner.tree import Node


class Beam(Params):
    n: Samples = 16
    expansions: Annotated[int, Field(ge=1, le=64, description="Continuations of each kept beam (M).")] = 4
    max_steps: Annotated[int, Field(ge=1, le=256, description="Steps after which the search ends.")] = 40


async def run(search: Search, params: Beam, equivalence: Equivalence) -> Choice:  # noqa: ARG001
    """Grows n beams step by step, keeps the n/expansions that the verifier likes best; the best finished one wins."""
    expansions = min(params.expansions, params.n)
    width = params.n // expansions
    beams: list[Node] = [search.root]
    shares = [params.n]
    for _ in range(params.max_steps):
        level: list[Node] = []
        async for arrived in search.expand(beams, shares):
            await search.score(arrived)
            level += arrived
        rivals = sorted(distinct(level), key=lambda node: (-(node.score or 0.0), node.path))
        kept = [node for node in rivals[:width] if node.score is not None]
        await search.prune([node for node in level if node.open and node not in kept])
        beams = [node for node in kept if node.open]
        if not beams:
            break
        width = len(beams)  # a finished beam keeps its place: its share is not given to the others
        shares = [expansions] * len(beams)
    return best_scored(search.candidates())


def distinct(nodes: list[Node]) -> list[Node]:
    """One node of each text under the same parent: twins would fill the beam with one idea."""
    first: dict[tuple[tuple[int, ...], str], Node] = {}
    for node in sorted(nodes, key=lambda node: node.path):
        first.setdefault((() if node.parent is None else node.parent.path, node.text), node)
    return list(first.values())


STRATEGY = Strategy("beam", Beam, run, needs_verifier=True)
