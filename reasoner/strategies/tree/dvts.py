"""Diverse verifier tree search: several independent beams of width one.

Source: Beeching, Tunstall and Rush 2024, "Scaling test-time compute with open models", section "DVTS": n / M
independent subtrees; in each, of M next steps the best-scored one is continued. Nothing is compared across
subtrees, so each continues as soon as its own steps have arrived.

As in ``beam``, further samples of a step are taken only if the first is uncertain and a new one is likely enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Steps, Strategy, VerifierUse, choose_best_scored
from reasoner.strategies.tree.beam import needs_no_siblings, num_useful_samples
from reasoner.tree import Node


class Dvts(Params):
    n: Samples = 16
    expansions: Annotated[int, Field(ge=1, le=64, description="Samples of each step of a subtree (M).")] = 4
    max_steps: Steps = 40


@dataclass(slots=True)
class Subtree:
    """One subtree. ``tip`` is the node that is extended, ``rivals`` are the arrived next steps out of ``requested``."""

    tip: Node
    width: int
    requested: int
    rivals: list[Node] = field(default_factory=list)


async def run(search: Search, params: Dvts) -> Choice:
    """Extend n/expansions independent subtrees, each by its best-scored step; the best finished solution wins."""
    width = min(params.expansions, params.n)
    starts = range(0, params.n, width)
    subtrees = [Subtree(search.root, each, each) for each in (min(width, params.n - start) for start in starts)]
    async with search.stream() as stream:
        for subtree in subtrees:
            stream.expand([search.root], subtree.width)
        async for arrived in stream:
            await search.score(arrived)
            for node in arrived:
                subtree = subtrees[node.path[0] // width]
                subtree.rivals.append(node)
                if len(subtree.rivals) < subtree.requested:
                    continue
                more = (
                    0
                    if subtree.requested > 1 or needs_no_siblings(node)
                    else num_useful_samples(subtree.rivals, subtree.width - 1)
                )
                if more > 0 and (added := stream.expand([subtree.tip], more)):
                    subtree.requested += added
                    continue
                best = choose_best(subtree.rivals)
                await search.prune([rival for rival in subtree.rivals if rival.open and rival is not best])
                if best.open and best.score is not None and len(best.path) < params.max_steps:
                    subtree.tip, subtree.requested, subtree.rivals = best, 1, []
                    stream.expand([best], 1)
    return choose_best_scored(await search.ensure_candidates())


def choose_best(rivals: list[Node]) -> Node:
    """Return the rival with the highest score; of equals the first in path order."""
    return max(sorted(rivals, key=lambda node: node.path), key=lambda node: -1.0 if node.score is None else node.score)


STRATEGY = Strategy("dvts", Dvts, run, VerifierUse.STEP_SCORES)
