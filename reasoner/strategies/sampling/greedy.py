"""Greedy decoding: the baseline of every comparison."""

from __future__ import annotations

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Strategy


class Greedy(Params):
    """No parameters."""


async def run(search: Search, params: Greedy) -> Choice:  # noqa: ARG001
    """Generate one solution by greedy decoding."""
    async for _ in search.complete([search.root], 1, greedy=True):
        pass
    candidates = search.candidates()
    return Choice(candidates[0] if candidates else None)


STRATEGY = Strategy("greedy", Greedy, run)
