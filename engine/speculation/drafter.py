"""Guesses at how branches go on, and what a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.scheduler.sequence import GenerateSequence


@lru_cache(64)
def chain_parents(count: int) -> tuple[int, ...]:
    """The parents of so many tokens of which each follows the one before it."""
    return tuple(range(-1, count - 1))


@dataclass(slots=True)
class Draft:
    """A tree of guessed tokens, whose root is the branch's last token.

    Nobody changes one. It is not frozen since that takes three times as long to make, and each branch gets one in each
    step."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """For each token the index of the one before it, which comes earlier in ``tokens``; -1 is the root."""
    chances: tuple[float, ...]
    """For each token the drafter's estimate of the probability that it is accepted if its parent is."""

    @classmethod
    def chain(cls, tokens: Sequence[int], chances: Sequence[float]) -> Draft:
        """Guesses that follow each other."""
        return cls(tuple(tokens), chain_parents(len(tokens)), tuple(chances))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == chain_parents(len(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """For each token its distance from the root, 1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    def path(self, index: int) -> list[int]:
        """The guessed tokens from the root to a token, itself included; none for the root (-1)."""
        path: list[int] = []
        while index >= 0:
            path.append(self.tokens[index])
            index = self.parents[index]
        return path[::-1]

    def part(self, kept: Sequence[int]) -> Draft:
        """The tree of some of its tokens, by ascending index. The parent of each is kept too, or is the root."""
        places = {-1: -1} | {index: place for place, index in enumerate(kept)}
        return Draft(
            tuple(self.tokens[index] for index in kept),
            tuple(places[self.parents[index]] for index in kept),
            tuple(self.chances[index] for index in kept),
        )

    def before(self, ends: frozenset[int]) -> Draft:
        """The part without tokens that end the branch. Who draws one where all before it is right ends there: to
        compute it spares no step."""
        kept: list[int] = []
        left = {-1}
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in left and token not in ends:
                left.add(index)
                kept.append(index)
        return self.part(kept)


EMPTY = Draft((), (), ())


class Wish(NamedTuple):
    """What is asked of a drafter for one branch."""

    sequence: GenerateSequence
    """All its tokens but the last are computed."""
    depth: int
    """Most tokens after each other, at least 1."""
    nodes: int
    """Most tokens in all, at least ``depth``; as many mean a chain."""


class Advance(NamedTuple):
    """What a step did to one branch that goes on."""

    sequence: GenerateSequence
    """With the tokens that it drew; all but the last are computed."""
    first: int
    """Position of the first token whose hidden state the step computed and keeps."""
    rows: Sequence[int]
    """Rows of the step's hidden states, for the positions from ``first`` on."""


class Watch(Enum):
    """The steps that a drafter must hear of."""

    NONE = auto()
    """It reads what it missed from the branches' tokens: when it is told of a step, then of none of its branches."""
    LAST = auto()
    """The one before it is asked."""
    ALL = auto()


class Drafter(Protocol):
    """Guesses tokens. What it guesses changes the speed, never the result.

    One thread calls it. It sees the same tokens again and again: a branch may be preempted, cut and continued by
    another request, or forked at any token, and the cached prefix of a new branch was computed without it.
    """

    kind: str
    """Its name for people, metrics and options."""
    layers: int
    """Layers of keys and values that it keeps in the target's pages, behind the target's own; usually 0."""
    watches: Watch
    """Of which steps ``advance`` must be told."""

    def reset(self, cache: KVCache) -> None:
        """The target's cache is this one now, and empty; no branch is known. Called before anything else."""
        ...

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """Guesses for each branch, ``EMPTY`` where there are none."""
        ...

    def advance(self, steps: Sequence[Advance], hidden: Tensor) -> None:
        """Learns what a step computed: ``hidden`` ``[rows, width]`` are the target's final hidden states, before its
        last norm. Called after every step, prompts' chunks included (they may have drawn nothing yet), but see
        ``watches``."""
        ...

    def forget(self, sequence: GenerateSequence) -> None:
        """A branch is over, whatever the reason; it may never have been seen before."""
        ...

    def clear_cache(self) -> None:
        """Forgets the keys and values of its own that no running branch uses."""
        ...
