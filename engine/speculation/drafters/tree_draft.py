"""Trees of draft tokens that grow level by level.

The dynamic trees of EAGLE-2 (Li et al. 2024, https://arxiv.org/abs/2406.16858): the value of a draft token is the
product of the probabilities on its path, a level expands the tokens of the highest values, and at the end the best ones
stay. A path's value never exceeds that of its beginning, so a token that is not among the best of its tree so far never
will be, and the best ones are a tree. A chain is the tree in which each token is the best one after the token before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.sampling.sampler import Ints
from engine.scheduler.draft import Draft
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters.proposal import DraftSampler

WIDTH = 4
"""Maximum number of children of a node."""
_CANDIDATES = 6
"""Candidates of each position in a tree of independent positions."""
FLOOR = 0.2
"""Minimum value of a node that is expanded. One more draft token costs a bundled model's drafter about a fifth of the
time of a token."""


class Level(NamedTuple):
    """Nodes to expand. Each array has a row for each."""

    branches: Ints
    """Branch of each node, ascending."""
    parents: Ints
    """Rows of the level before, or branches for the first level."""
    tokens: Ints


def grow_trees(requests: Sequence[DraftRequest], logits: Tensor, follow: Callable[[Level], Tensor]) -> list[Draft]:
    """Return a draft for each request.

    ``logits``: ``[requests, vocab]``, for the first draft tokens; ``follow`` returns the logits ``[rows, vocab]`` after
    each token of a level. Both may be changed."""
    depth = max(request.depth for request in requests)
    sampler = DraftSampler([request.sequence for request in requests])
    trees = [_Tree(request) for request in requests]
    width = WIDTH if any(request.nodes > request.depth for request in requests) else 1
    branches, nodes = np.arange(len(requests)), [-1] * len(requests)
    for ahead in range(depth):
        paths = (
            [trees[branch].path(node) for branch, node in zip(branches, nodes, strict=True)]
            if sampler.has_processors
            else None
        )
        tokens, probs = sampler.best(logits, branches, ahead=np.full(len(branches), ahead), width=width, paths=paths)
        rows = zip(branches.tolist(), nodes, tokens.tolist(), probs.tolist(), strict=True)
        for row, (branch, node, some, row_probs) in enumerate(rows):
            trees[branch].add(node, row, some, row_probs)
        level, nodes = _next_level(trees, ahead + 1)
        if not nodes:
            break
        logits, branches = follow(level), level.branches
    return [tree.draft() for tree in trees]


class _Tree:
    """One branch's tree. ``rows``: the row of the previous level whose logits each token was sampled from."""

    def __init__(self, request: DraftRequest) -> None:
        self.depth = request.depth
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self._parents: list[int] = []
        self._probs: list[float] = []
        self._values: list[float] = []
        self._last = 0
        """Index of the first token of the latest level."""
        self._nodes = request.nodes
        self._chain = request.nodes == request.depth
        self._ends = request.sequence.terminal_tokens

    def add(self, parent: int, row: int, tokens: list[int], probs: list[float]) -> None:
        value = self._values[parent] if parent >= 0 else 1.0
        for token, prob in list(zip(tokens, probs, strict=True))[: 1 if self._chain else None]:
            if not prob > 0:
                break  # the branch's filters exclude it and all that are worse
            self.tokens.append(token)
            self.rows.append(row)
            self._parents.append(parent)
            self._probs.append(prob)
            self._values.append(value * prob)

    def select_expanded(self) -> list[int]:
        """Return the nodes of the latest level to expand: those among the best so far, and of sufficient value."""
        first, self._last = self._last, len(self.tokens)
        return [
            node
            for node in self._select_best()
            if node >= first and self._values[node] >= FLOOR and self.tokens[node] not in self._ends
        ]

    def path(self, node: int) -> list[int]:
        """Return the draft tokens up to a node, inclusive; none for the root (-1)."""
        return self._whole.path(node)

    def draft(self) -> Draft:
        """Return the draft of the best nodes."""
        return self._whole if len(self.tokens) <= self._nodes else self._whole.select(self._select_best())

    @property
    def _whole(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self._parents), tuple(self._probs))

    def _select_best(self) -> list[int]:
        """Return the best nodes in ascending order; of equal values the earlier is better, and parents are earlier."""
        return sorted(sorted(range(len(self._values)), key=lambda node: -self._values[node])[: self._nodes])


def _next_level(trees: Sequence[_Tree], depth: int) -> tuple[Level, list[int]]:
    """Return the next level of the trees deeper than ``depth``, and its nodes' indices in their trees."""
    chosen = [
        (branch, node) for branch, tree in enumerate(trees) if tree.depth > depth for node in tree.select_expanded()
    ]
    branches, nodes = [branch for branch, _ in chosen], [node for _, node in chosen]
    level = Level(
        np.array(branches, np.int64),
        np.array([trees[branch].rows[node] for branch, node in chosen], np.int64),
        np.array([trees[branch].tokens[node] for branch, node in chosen], np.int64),
    )
    return level, nodes


def combine_positions(requests: Sequence[DraftRequest], logits: Tensor, depth: int) -> list[Draft]:
    """Return a draft for each request whose positions were predicted independently of each other.

    A tree is every combination of the positions' candidates, of which the likeliest stay. ``logits``: ``[requests *
    depth, vocab]``, request by request, which may be changed.
    """
    width = _CANDIDATES if any(request.nodes > request.depth for request in requests) else 1
    sampler = DraftSampler([request.sequence for request in requests])
    tokens, probs = sampler.best(logits, *_index_rows(len(requests), depth), width)
    shape = len(requests), depth, -1
    return [
        _combine(some[: request.depth], some_probs, request)
        for request, some, some_probs in zip(
            requests, tokens.reshape(shape).tolist(), probs.reshape(shape).tolist(), strict=True
        )
    ]


@lru_cache(64)
def _index_rows(count: int, depth: int) -> tuple[Ints, Ints]:
    """Return the branch of each row of logits, and its number of draft tokens before."""
    return np.arange(count).repeat(depth), np.tile(np.arange(depth), count)


def _combine(tokens: list[list[int]], probs: list[list[float]], request: DraftRequest) -> Draft:
    """Return the likeliest combinations of each depth's candidates, which are sorted best first."""
    if request.nodes == request.depth:
        return Draft.chain([some[0] for some in tokens], [some[0] for some in probs[: len(tokens)]])
    nodes: list[tuple[int, int, int]] = []
    """Parent, depth and rank among the candidates of each draft token."""
    worth = [(-probs[0][0], -1, 0, 0)]
    while worth and len(nodes) < request.nodes:
        minus, parent, depth, rank = heapq.heappop(worth)
        if minus == 0:
            break
        if rank + 1 < len(tokens[depth]):
            heapq.heappush(worth, (minus / probs[depth][rank] * probs[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(tokens):
            heapq.heappush(worth, (minus * probs[depth + 1][0], len(nodes), depth + 1, 0))
        nodes.append((parent, depth, rank))
    return Draft(
        tuple(tokens[depth][rank] for _, depth, rank in nodes),
        tuple(parent for parent, _, _ in nodes),
        tuple(probs[depth][rank] for _, depth, rank in nodes),
    )
