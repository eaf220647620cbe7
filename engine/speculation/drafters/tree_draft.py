"""Trees of guesses that grow level by level, each guess made after those before it.

The dynamic trees of EAGLE-2 (Li et al. 2024, https://arxiv.org/abs/2406.16858): a guess is worth the product of the
chances on its path, a level follows the guesses that are worth most, and at the end the best stay. Since a path is
never worth more than its beginning, a guess that is not among the best of its tree so far will never be, and the best
are a tree. A chain is the tree in which each guess is the best after the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.sampling.truncation import Ints
from engine.scheduler.draft import Draft
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters.proposal import DraftSampler

_WIDTH = 4
"""Most guesses after one guess of a tree."""
FLOOR = 0.2
"""A guess that is worth less is not followed. To guess once more costs a bundled model's drafter about a fifth of the
time that a token takes."""


class Level(NamedTuple):
    """Guesses that are followed: what comes after them is guessed next. Each array has a row for each."""

    branches: Ints
    """Ascending."""
    parents: Ints
    """Rows of the level before, or of the branches for the first level."""
    tokens: Ints


def grow(wishes: Sequence[DraftRequest], logits: Tensor, follow: Callable[[Level], Tensor]) -> list[Draft]:
    """A draft for each wish.

    ``logits``: ``[wishes, vocab]``, the drafter's for the first guesses; ``follow`` gives those of the token after each
    guess of a level, ``[rows, vocab]``. Both may be changed.
    """
    depth = max(wish.depth for wish in wishes)
    guesses = DraftSampler([wish.sequence for wish in wishes])
    trees = [_Tree(wish) for wish in wishes]
    width = _WIDTH if any(wish.nodes > wish.depth for wish in wishes) else 1
    branches, nodes = np.arange(len(wishes)), [-1] * len(wishes)
    for ahead in range(depth):
        paths = (
            [trees[branch].path(node) for branch, node in zip(branches, nodes, strict=True)]
            if guesses.changed
            else None
        )
        tokens, chances = guesses.best(logits, branches, np.full(len(branches), ahead), width, paths)
        rows = zip(branches.tolist(), nodes, tokens.tolist(), chances.tolist(), strict=True)
        for row, (branch, node, some, odds) in enumerate(rows):
            trees[branch].add(node, row, some, odds)
        level, nodes = _next_level(trees, ahead + 1)
        if not nodes:
            break
        logits, branches = follow(level), level.branches
    return [tree.draft() for tree in trees]


class _Tree:
    """One branch's guesses. ``rows``: the row of the level before whose logits each was made from."""

    def __init__(self, wish: DraftRequest) -> None:
        self.depth = wish.depth
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self._parents: list[int] = []
        self._chances: list[float] = []
        self._worth: list[float] = []
        self._last = 0
        """The first guess of the latest level."""
        self._nodes = wish.nodes
        self._chain = wish.nodes == wish.depth
        self._ends = wish.sequence.terminal_tokens

    def add(self, parent: int, row: int, tokens: list[int], chances: list[float]) -> None:
        worth = self._worth[parent] if parent >= 0 else 1.0
        for token, chance in list(zip(tokens, chances, strict=True))[: 1 if self._chain else None]:
            if not chance > 0:
                break  # the branch's filters leave it out, and what is worse
            self.tokens.append(token)
            self.rows.append(row)
            self._parents.append(parent)
            self._chances.append(chance)
            self._worth.append(worth * chance)

    def followed(self) -> list[int]:
        """Guesses of the latest level that are among the best so far, and worth it."""
        first, self._last = self._last, len(self.tokens)
        return [
            node
            for node in self._best()
            if node >= first and self._worth[node] >= FLOOR and self.tokens[node] not in self._ends
        ]

    def path(self, node: int) -> list[int]:
        """The guesses up to one, itself included; none for the root (-1)."""
        return self._whole.path(node)

    def draft(self) -> Draft:
        """The best of the guesses."""
        return self._whole if len(self.tokens) <= self._nodes else self._whole.select(self._best())

    @property
    def _whole(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self._parents), tuple(self._chances))

    def _best(self) -> list[int]:
        """By ascending index. Of guesses that are worth the same the earlier is better, and parents are earlier."""
        return sorted(sorted(range(len(self._worth)), key=lambda node: -self._worth[node])[: self._nodes])


def _next_level(trees: Sequence[_Tree], depth: int) -> tuple[Level, list[int]]:
    """The level of trees that grow beyond ``depth``, and the guesses' indices in their trees."""
    chosen = [(branch, node) for branch, tree in enumerate(trees) if tree.depth > depth for node in tree.followed()]
    branches, nodes = [branch for branch, _ in chosen], [node for _, node in chosen]
    level = Level(
        np.array(branches, np.int64),
        np.array([trees[branch].rows[node] for branch, node in chosen], np.int64),
        np.array([trees[branch].tokens[node] for branch, node in chosen], np.int64),
    )
    return level, nodes
