"""Scores of nodes and comparisons of pairs, each computed once and journaled before the strategy sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from engine.protocol.types import Tokens
from reasoner.budget.usage import Usage
from reasoner.deadline import run_unless
from reasoner.jobs.journal import JobCancelled
from reasoner.search.replay import PendingEntry, ReplayLog
from reasoner.search.scoring import NodeScore, NodeScorer, PairScore, PairScorer, inherited_scores
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node

log = logging.getLogger("reasoner.search")

Pair = tuple[Node, Node]
VerdictKey = tuple[Tokens, str]


class ScoreRecorder:
    """Scores nodes with a verifier, through the journal."""

    def __init__(self, scorer: NodeScorer, replay_log: ReplayLog, context: StreamContext) -> None:
        self._scorer = scorer
        self._replay_log = replay_log
        self._context = context
        self._verdicts: dict[VerdictKey, tuple[int, tuple[float, ...], float]] = {}
        """For each scored text: the number of inherited step scores, the scores of its own steps, and its score."""
        self._without_verdict: set[Node] = set()
        """Nodes that the verifier was asked about in vain."""
        self._num_scored = 0

    async def score(self, nodes: Sequence[Node]) -> None:
        """Set the scores of all scorable nodes that the budget reaches."""
        while remaining := [node for node in nodes if self._is_due(node)]:
            if await self._score_batch(remaining):
                continue
            if not await self._context.can_retry(is_step=True):
                self._context.is_budget_exhausted = True
                return

    def describe_missing(self) -> str | None:
        """Return a sentence on the solutions without a verdict, ``None`` if there are none."""
        return _describe_missing(len(self._without_verdict), self._num_scored, "solutions")

    def _is_due(self, node: Node) -> bool:
        return node.score is None and node not in self._without_verdict and self._scorer.scorable(node)

    async def _score_batch(self, nodes: list[Node]) -> bool:
        """Score some of the nodes; return True if any got a score."""
        by_key = {f"score:{node.id}": node for node in nodes}
        if self._replay_log.is_replaying:
            entries = self._replay_log.replay(by_key)
        else:
            repeats = [repeat for node in nodes if (repeat := self._repeated_score(node)) is not None]
            started_at = self._context.search.ledger.elapsed_seconds()
            scored = repeats or await self._ask_verifier(nodes)
            seconds = self._context.search.ledger.elapsed_seconds() - started_at
            entries = await self._replay_log.write([self._create_entry(score, seconds) for score in scored])
        for entry in entries:
            node, steps = by_key[entry.key], tuple(entry.data["scores"])
            if entry.data["score"] is None:
                self._without_verdict.add(node)
                continue
            self._num_scored += 1
            inherited = inherited_scores(node)
            self._verdicts.setdefault(_verdict_key(node), (len(inherited), steps, entry.data["score"]))
            node.scores = inherited + steps
            node.score = entry.data["score"]
        return bool(entries)

    async def _ask_verifier(self, nodes: list[Node]) -> list[NodeScore]:
        """Ask the verifier. Raises ``JobCancelled`` as soon as the job is cancelled, since critiques take long."""
        scored = await run_unless(
            self._context.search.cancelled, partial(self._scorer.score, _independent_nodes(nodes))
        )
        if scored is None:
            raise JobCancelled
        return scored

    def _repeated_score(self, node: Node) -> NodeScore | None:
        """Return the existing score of an equal text after the same tokens, if there is one, without computation."""
        num_inherited, steps, score = self._verdicts.get(_verdict_key(node), (-1, (), 0.0))
        return NodeScore(node, score, steps) if num_inherited == len(inherited_scores(node)) else None

    def _create_entry(self, scored: NodeScore, seconds: float) -> PendingEntry:
        data = {
            "node": scored.node.id,
            "scores": list(scored.steps),
            "score": scored.score,
            "computed": scored.spend.verifier_computed,
            "cached": scored.spend.verifier_cached,
            "seconds": round(seconds, 6),
            **scored.details,
            **self._context.name_model(self._context.search.verifier),
        }
        spend = _count_unscored(scored.score, scored.spend, scored.node.id)
        return PendingEntry(f"score:{scored.node.id}", "score", data=data, spend=spend, reserved=scored.reserved)


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
                self._context.is_budget_exhausted = True
                break
        return {pair: self._scores[pair] for pair in pairs if pair in self._scores}

    def describe_missing(self) -> str | None:
        """Return a sentence on the pairs without a verdict, ``None`` if there are none."""
        missing = sum(score is None for score in self._scores.values())
        return _describe_missing(missing // 2, (len(self._scores) - missing) // 2, "pairs")

    async def _compare_batch(self, pairs: list[Pair]) -> bool:
        """Compare some of the pairs; return True if any has a result."""
        by_key = {_pair_key(pair): pair for pair in pairs}
        if self._replay_log.is_replaying:
            entries = self._replay_log.replay(by_key)
        else:
            started_at = self._context.search.ledger.elapsed_seconds()
            scored = await run_unless(self._context.search.cancelled, partial(self._scorer.compare, pairs))
            if scored is None:
                raise JobCancelled
            seconds = self._context.search.ledger.elapsed_seconds() - started_at
            entries = await self._replay_log.write([self._create_entry(score, seconds) for score in scored])
        for entry in entries:
            first, second = pair = by_key[entry.key]
            score = entry.data["score"]
            self._scores[pair] = score
            self._scores[second, first] = None if score is None else 1.0 - score
        return bool(entries)

    def _create_entry(self, scored: PairScore, seconds: float) -> PendingEntry:
        data = {
            "nodes": [node.id for node in scored.pair],
            "score": scored.score,
            "computed": scored.spend.verifier_computed,
            "cached": scored.spend.verifier_cached,
            "seconds": round(seconds, 6),
            **scored.details,
            **self._context.name_model(self._context.search.verifier),
        }
        spend = _count_unscored(scored.score, scored.spend, " and ".join(data["nodes"]))
        return PendingEntry(_pair_key(scored.pair), "compare", data=data, spend=spend, reserved=scored.reserved)


def _describe_missing(num_missing: int, num_found: int, what: str) -> str | None:
    if not num_missing:
        return None
    end = "" if num_found else ": it has ranked nothing"
    return f"the verifier gave no verdict that can be read on {num_missing} of {num_missing + num_found} {what}{end}"


def _count_unscored(score: float | None, spend: Usage, subject: str) -> Usage:
    """Return the spend of a verdict; one that gave no score is counted, and logged without its words."""
    if score is not None:
        return spend
    log.warning("the verifier gave no verdict on %s that can be read: it has no score", subject)
    return spend + Usage(unscored=1)


def _independent_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that can be scored at once.

    Left out are nodes with an ancestor among them, whose scores extend the ancestor's, and nodes that repeat another's
    text, which get that node's score.
    """
    remaining = set(nodes)
    first = set({_verdict_key(node): node for node in reversed(nodes)}.values())
    return [node for node in nodes if node in first and remaining.isdisjoint(node.lineage()[:-1])]


def _verdict_key(node: Node) -> VerdictKey:
    """Return the key of a node's verdict: all tokens up to the node's end, and its own text."""
    return node.prefix, node.text


def _pair_key(pair: Pair) -> str:
    return f"compare:{pair[0].id}:{pair[1].id}"
