"""Comparisons of solutions, each made once and journaled before the strategy sees it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reasoner.deadline import run_unless
from reasoner.jobs.journal import JobCancelled
from reasoner.search.replay import PendingEntry, ReplayLog
from reasoner.search.scoring import PairScore, PairScorer
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node

Pair = tuple[Node, Node]


class ComparisonRecorder:
    """Compares pairs of nodes with a verifier, through the journal."""

    def __init__(self, scorer: PairScorer, replay_log: ReplayLog, context: StreamContext) -> None:
        self._scorer = scorer
        self._replay_log = replay_log
        self._context = context
        self._scores: dict[Pair, float | None] = {}

    async def compare(self, pairs: Sequence[Pair]) -> dict[Pair, float | None]:
        """Return the probabilities that the first of each pair is better.

        ``None`` stands for a pair without a verdict. Pairs that the budget does not reach are missing.
        """
        while remaining := [pair for pair in dict.fromkeys(pairs) if pair not in self._scores]:
            if await self._compare_batch(remaining):
                continue
            if not await self._context.can_retry(is_step=True):
                self._context.is_cut_short = True
                break
        return {pair: self._scores[pair] for pair in pairs if pair in self._scores}

    async def _compare_batch(self, pairs: list[Pair]) -> bool:
        """Compare some of the pairs; return True if any has a result."""
        by_key = {_key(pair): pair for pair in pairs}
        if self._replay_log.is_replaying:
            entries = self._replay_log.replay(by_key)
        else:
            scored = await run_unless(self._context.search.cancelled, partial(self._scorer.compare, pairs))
            if scored is None:
                raise JobCancelled
            entries = await self._replay_log.write([_entry(score) for score in scored])
        for entry in entries:
            first, second = pair = by_key[entry.key]
            score = entry.data["score"]
            self._scores[pair] = score
            self._scores[second, first] = None if score is None else 1.0 - score
        return bool(entries)


def _key(pair: Pair) -> str:
    return f"compare:{pair[0].id}:{pair[1].id}"


def _entry(scored: PairScore) -> PendingEntry:
    data = {
        "nodes": [node.id for node in scored.pair],
        "score": scored.score,
        "computed": scored.spend.verifier_computed,
        "cached": scored.spend.verifier_cached,
        **scored.details,
    }
    return PendingEntry(_key(scored.pair), "compare", data, scored.spend, scored.reserved)
