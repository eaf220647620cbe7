"""Search that resamples its branches after each step by the verifier's scores, for REBASE and particle filtering."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, choose_by_majority, expand_and_score, weigh_by_score


async def resampling_search(
    search: Search,
    n: int,
    max_steps: int,
    allocate: Callable[[int, Sequence[float], int], Sequence[int]],
) -> Choice:
    """Extend n branches step by step; finished ones keep their slots and vote with their scores.

    ``allocate(step, scores, slots)`` returns how many of the slots that are left each of the live branches gets.
    """
    parents, shares, slots = [search.root], [n], n
    for step in range(max_steps):
        level = await expand_and_score(search, parents, shares)
        slots -= sum(node.answer is not None for node in level)
        live = sorted((node for node in level if node.open and node.score is not None), key=lambda node: node.path)
        counts = allocate(step, [node.score or 0.0 for node in live], slots)
        chosen = [(node, count) for node, count in zip(live, counts, strict=True) if count > 0]
        parents, shares = [node for node, _ in chosen], [count for _, count in chosen]
        await search.prune([node for node in level if node.open and node not in parents])
        if not parents:
            break
    candidates = await search.ensure_candidates()
    return await choose_by_majority(search, candidates, weigh_by_score(candidates))
