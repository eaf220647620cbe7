"""Draft tokens of one branch: the data that drafters propose, batches carry and verification reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


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
