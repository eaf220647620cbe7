"""Best-first search: sample one step at a time at the most promising node, until an answer is certain enough.

The frontier has the nodes that can be continued; expanding one costs a sampled step and its score. The search always
expands the node with the highest reservation index and ends when an answer reaches the job's confidence. Source:
Weitzman 1979, "Optimal Search for the Best Alternative" (Pandora's boxes and their reservation prices). Here a node
may be expanded again, and the odds below replace the price, since an answer is right or wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.search import Search
from reasoner.strategies.answer_posterior import estimate_posterior, meets_confidence
from reasoner.strategies.base import (
    MIN_NEW_PROBABILITY,
    Choice,
    DecidedBy,
    Feature,
    Params,
    Strategy,
    VerifierUse,
    expand_and_score,
)
from reasoner.tree import Node, unseen

STEP_SUCCESS = 0.25
"""Prior probability that a step from a solvable state leads to a solvable state."""
SOLVABLE = 0.9
"""Prior probability that the policy can solve the question at all."""
MAX_SCORE = 0.999
"""Upper limit of a verifier's score, so that the index of a state falls with unsuccessful samples."""


class BestFirst(Params):
    n: Annotated[
        int, Field(ge=1, le=MAX_N, description="Steps that are sampled: as many as this many solutions take.")
    ] = 16
    max_steps: Annotated[int, Field(ge=1, le=256, description="Steps that a solution may have.")] = 40
    width: Annotated[int, Field(ge=1, le=64, description="Steps that are sampled at once.")] = 4


async def run(search: Search, params: BestFirst) -> Choice:
    """Sample single steps at the most promising nodes, and stop when the answer is certain enough."""
    existing = [node for node in search.root.walk() if node.open and node.parent is not None]  # of earlier stages
    await search.score(existing)
    frontier = {
        node: compute_reservation_index(node)
        for node in [search.root, *(node for node in existing if can_expand(node, params.max_steps))]
    }
    sampled, length = 0, 1
    candidates = search.candidates()
    choice = await estimate_posterior(search)
    while (left := params.n * length - sampled) > 0 and not meets_confidence(search, choice):
        picks = choose_nodes(frontier, min(params.width, left))
        arrived = await expand_and_score(search, list(picks), list(picks.values()))
        num_known, candidates = len(candidates), search.candidates()
        if len(candidates) > num_known:
            choice = await estimate_posterior(search)
        if not arrived:
            break
        sampled += len(arrived)
        stepped = [
            node
            for node in candidates
            if len(node.path) > 1 and search.spec.step_rule.is_single(node.text, node.tokens)
        ]
        ended = [len(node.path) for node in stepped]
        length = min(ended, default=max(length, *(len(node.path) + 1 for node in arrived)))
        frontier |= {
            node: compute_reservation_index(node)
            for node in [*picks, *(node for node in arrived if can_expand(node, params.max_steps))]
        }
    if not candidates and await search.ensure_candidates():
        choice = await estimate_posterior(search)
    return choice


def choose_nodes(frontier: Mapping[Node, float], width: int) -> Counter[Node]:
    """Return the nodes to expand next, the best first, with the number of samples of each.

    A node gives one sample when it is first expanded, since that often suffices, and then one, two, four, ….
    """
    now, picks = dict(frontier), Counter[Node]()
    while now and picks.total() < width:
        best = max(now, key=lambda node: (now[node], node.path))
        picks[best] += 1
        if best.parent is not None and picks[best] >= max(1, len(best.children)):
            del now[best]
        else:
            now[best] = compute_reservation_index(best, picks[best])
    return picks


def compute_reservation_index(node: Node, pending: int = 0) -> float:
    """Return the reservation index of a node.

    It is the probability that the state is solvable, given its samples, and that the next sample is new, divided by
    the prior probability of a state of this depth. A child has a higher index than its parent if it is more likely to
    be good than another sample of the parent.

    A node may be expanded again while another sample is likely enough to be new. That probability is the lesser of two
    estimates: from the probabilities of the samples, and from the share of those that occurred once (Good 1953, "The
    Population Frequencies of Species and the Estimation of Population Parameters").
    """
    texts = Counter(child.text for child in node.children)
    once = sum(count == 1 for count in texts.values()) / len(node.children) if node.children else 1.0
    left = unseen(node.children)
    new = min(once, left) if left >= MIN_NEW_PROBABILITY else 0.0
    prior = SOLVABLE if node.parent is None else min(node.score or 0.0, MAX_SCORE)
    scores = sorted([child.score or 0.0 for child in node.children])  # independent of the order of arrival
    failed = math.prod(1.0 - STEP_SUCCESS * (1.0 - score) for score in [*scores, *[0.0] * pending])
    return new * prior * failed / (prior * failed + 1.0 - prior) / STEP_SUCCESS ** len(node.path)


def can_expand(node: Node, max_steps: int) -> bool:
    """Return True if the node has a score, can be continued, and is no duplicate of an earlier sibling."""
    return (
        node.parent is not None
        and node.open
        and len(node.path) < max_steps
        and node.score is not None
        and not any(other.text == node.text and other.path < node.path for other in node.parent.children)
    )


STRATEGY = Strategy(
    "best_first",
    BestFirst,
    run=run,
    verifier=VerifierUse.STEP_SCORES,
    decided_by=DecidedBy.VOTE,
    supports={Feature.CONSTRAINT, Feature.EARLY_STOP},
)
