"""Deep think with confidence: votes are weighted by token confidence, and solutions of low confidence have none.

Source: Fu et al. 2025, "Deep Think with Confidence", sections 3.2 (offline) and 3.3 (online). Offline, all solutions
are sampled, and the ``keep`` per cent with the highest confidence vote. Online, a warm-up sets the threshold that this
percentage of its solutions passes; a later solution is pruned when one of its windows falls below, and the vote ends
when the leading answer has the share ``consensus`` of the weight. Two things differ from the paper: warm-up solutions
below the threshold have no vote either, and after the warm-up only as many run at once as may complete the consensus,
so that few are cancelled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from engine.protocol.types import Capability
from reasoner.answers.votes import group_equivalent
from reasoner.confidence.token_confidence import (
    MEASURES,
    ConfidenceMeasure,
    confidence_threshold,
    group_confidences,
    lowest_confidence,
)
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.spec import JobSpec
from reasoner.search.branch_text import StreamMonitor
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Params, Samples, Strategy, choose_by_majority, count_abstained
from reasoner.tree import Node, Reason

MIN_MONITOR_INTERVAL, MAX_MONITOR_INTERVAL = 8, 256
"""Bounds of the interval in tokens at which a solution is checked; between them it is an eighth of the window."""


TOLERANCE = 1e-9
"""Tolerance for rounding errors of a share."""


class DeepConf(Params):
    n: Samples = 16
    mode: Annotated[
        Literal["offline", "online"], Field(description="Judge solutions when all are there, or while they grow.")
    ] = "offline"
    keep: Annotated[float, Field(gt=0, le=100, description="Per cent of the solutions that may vote.")] = 90
    measure: Annotated[
        ConfidenceMeasure,
        Field(
            description="A solution's weight: mean of its lowest tenth of windows, its last window, its lowest window, "
            "or the mean of all tokens. Online, the bar is for the lowest window in any case."
        ),
    ] = "lowest"
    window: Annotated[int, Field(ge=1, le=65536, description="Tokens of a window.")] = 2048
    top: Annotated[int, Field(ge=1, le=20, description="Likeliest tokens that a token's confidence looks at.")] = 20
    warmup: Annotated[int, Field(ge=1, le=MAX_N, description="Online: solutions of the warm-up.")] = 16
    consensus: Annotated[float, Field(gt=0.5, le=1, description="Online: share of the weight that ends the vote.")] = (
        0.95
    )


async def run(search: Search, params: DeepConf) -> Choice:
    """Sample up to n solutions; those with high token confidence vote, weighted by it."""
    first = params.n if params.mode == "offline" else min(params.warmup, params.n)
    async with search.stream() as stream:
        stream.complete([search.root], first, confidence=params.top)
        sampled = [node async for nodes in stream for node in nodes]
        values = [_filter_confidence(node, params) for node in sampled if _can_vote(node)]
        threshold = confidence_threshold(values, params.keep) if values else 0.0
        monitor = StreamMonitor(
            _watch_interval(params.window), lambda seen: prune_reason(seen.confidence, params.window, threshold)
        )
        started = first
        while True:
            voters = _select_voters(search.spec, sampled, params, threshold)
            shares, num_silent = await _weights_by_answer(search, voters), count_abstained(sampled, voters)
            silent = num_silent * sum(voters.values()) / max(1, len(voters))
            more = min(count_missing_votes(shares, params.consensus, silent), params.n - len(sampled))
            if more <= 0:
                break
            new = max(0, len(sampled) + more - started)
            stream.complete([search.root], new, confidence=params.top, monitor=monitor)
            started += new
            try:
                sampled += await anext(stream)
            except StopAsyncIteration:  # the budget is used up
                break
    weights = _select_voters(search.spec, sampled, params, threshold)
    return await choose_by_majority(search, list(weights), weights, sampled)


def prune_reason(confidence: Sequence[float], window: int, threshold: float) -> Reason | None:
    """Return ``pruned`` if a window of confidence that ends in the newest tokens is below the threshold."""
    newest = confidence[-(window - 1 + _watch_interval(window)) :]
    return "pruned" if len(newest) >= window and min(group_confidences(newest, window)) < threshold else None


def count_missing_votes(votes: Sequence[Sequence[float]], consensus: float, abstained: float = 0.0) -> int:
    """Return the number of votes that the leading answer still needs if each has the largest weight so far.

    ``votes`` holds the weights of the votes for each answer, ``abstained`` the weight of the samples without one.
    """
    if not votes:
        return 1
    total, leader = sum(map(sum, votes)) + abstained, max(map(sum, votes))
    gap = consensus * total - leader
    if gap <= TOLERANCE:
        return 0
    step = (1.0 - consensus) * max(map(max, votes))
    return max(1, math.ceil(gap / step - TOLERANCE)) if step > 0.0 else sys.maxsize


def _watch_interval(window: int) -> int:
    return min(MAX_MONITOR_INTERVAL, max(MIN_MONITOR_INTERVAL, window // 8))


def _can_vote(node: Node) -> bool:
    """Return True if the solution has an answer and token confidences; a pruned one is below the threshold."""
    return node.answer is not None and len(node.confidence) > 0


def _filter_confidence(node: Node, params: DeepConf) -> float:
    """Return the solution's confidence for comparison with the threshold."""
    measure = lowest_confidence if params.mode == "online" else MEASURES[params.measure]
    return measure(node.confidence, params.window)


def _select_voters(spec: JobSpec, sampled: Sequence[Node], params: DeepConf, threshold: float) -> dict[Node, float]:
    """Return the solutions that may vote, in the order of their paths, with their weights."""
    passed = [node for node in sampled if _can_vote(node) and _filter_confidence(node, params) >= threshold]
    weight = MEASURES[params.measure]
    return {node: weight(node.confidence, params.window) for node in select_candidates(passed, spec)}


async def _weights_by_answer(search: Search, weights: dict[Node, float]) -> list[list[float]]:
    same = await group_equivalent(list(weights), search.spec.answer, search.equivalence)
    return [[weights[node] for node in group] for group in same]


STRATEGY = Strategy(
    "deepconf",
    DeepConf,
    run,
    decided_by=DecidedBy.VOTE,
    requires={Capability.CONTINUATION, Capability.LOGPROBS},
)
