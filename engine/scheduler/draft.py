"""Draft tokens of one branch, from drafter to batch to verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@lru_cache(64)
def chain_parents(num_tokens: int) -> tuple[int, ...]:
    """Return the parents of ``num_tokens`` tokens, each of which follows the one before it."""
    return tuple(range(-1, num_tokens - 1))


@dataclass(slots=True)
class Draft:
    """A tree of draft tokens, rooted at the branch's last token.

    Never mutated. It is not frozen because a frozen dataclass takes three times as long to create, and each branch gets
    one in each step.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of each token's predecessor, which comes earlier in ``tokens``; -1 is the root."""
    probs: tuple[float, ...]
    """The drafter's estimate, for each token, of the probability that it is accepted if its parent is."""

    @classmethod
    def chain(cls, tokens: Sequence[int], probs: Sequence[float]) -> Draft:
        """Create a draft in which each token follows the one before it."""
        return cls(tuple(tokens), chain_parents(len(tokens)), tuple(probs))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before it."""
        return self.parents == chain_parents(len(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each token from the root, 1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    def path(self, index: int) -> list[int]:
        """Return the draft tokens from the root to the token at ``index``, inclusive; none for the root (-1)."""
        path: list[int] = []
        while index >= 0:
            path.append(self.tokens[index])
            index = self.parents[index]
        return path[::-1]

    def select(self, indices: Sequence[int]) -> Draft:
        """Return the tree of some of the tokens, in ascending order. Each parent is selected too, or is the root."""
        new_indices = {-1: -1} | {old: new for new, old in enumerate(indices)}
        return Draft(
            tuple(self.tokens[index] for index in indices),
            tuple(new_indices[self.parents[index]] for index in indices),
            tuple(self.probs[index] for index in indices),
        )

    def without(self, stop_tokens: frozenset[int]) -> Draft:
        """Return the tree without ``stop_tokens`` and what follows them.

        If all tokens before it are accepted, the branch samples the stop token there and ends, so computing it saves no
        step.
        """
        kept: list[int] = []
        reachable = {-1}
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in reachable and token not in stop_tokens:
                reachable.add(index)
                kept.append(index)
        return self.select(kept)


EMPTY_DRAFT = Draft((), (), ())
