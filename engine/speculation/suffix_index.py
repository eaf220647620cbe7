"""What followed what: texts by their last 1, 2, 4 and 8 tokens, and which texts were read already.

What comes next is looked up by the longest suffix that was seen before. Lengths double: on texts of the bundled models
that finds as good drafts as all lengths from 1 to 8 do, for half the work. Lengths 1 and 2 alone lose a third to a half
of what is accepted of a chain of eight guesses; suffixes of 16 tokens would add a fiftieth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SIZES = (1, 2, 4, 8)
"""Lengths of suffixes that are indexed."""

REACH = SIZES[-1]
"""Tokens before a position that matter there."""

WIDTH = 16
"""Followers of one suffix that are kept: a suffix with more of them predicts nothing worth guessing."""

Window = tuple[int, ...]
"""The tokens before a position, at most ``REACH``."""


def window(tokens: Sequence[int], position: int) -> Window:
    """The tokens before ``position``."""
    return tuple(tokens[max(0, position - REACH) : position])


class Match(NamedTuple):
    """The longest known suffix of a window."""

    size: int
    followers: dict[int, int]
    """How often each token followed it, the last one that did so at the end."""


class SuffixIndex:
    """Counts followers of suffixes; of more than ``capacity`` suffixes, those that were added to longest ago go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._followers: OrderedDict[Window, int | dict[int, int]] = OrderedDict()
        """A token alone was seen once. Most suffixes are, and a dict for each would double the memory."""

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, before: Window, token: int) -> None:
        """``token`` came after ``before``."""
        known = self._followers
        for size in SIZES:
            if size > len(before):
                break
            suffix = before[-size:]
            followers = known.get(suffix)
            if followers is None:
                known[suffix] = token
                continue
            known.move_to_end(suffix)
            if isinstance(followers, int):
                followers = known[suffix] = {followers: 1}
            followers[token] = followers.pop(token, 0) + 1
            if len(followers) > WIDTH:
                del followers[next(iter(followers))]
        self.shrink(len(known) - self._capacity)

    def find(self, before: Window) -> Match | None:
        """What is known to follow the longest suffix of ``before``."""
        for size in reversed(SIZES):
            if size <= len(before):
                followers = self._followers.get(before[-size:])
                if followers is not None:
                    return Match(size, {followers: 1} if isinstance(followers, int) else followers)
        return None

    def shrink(self, count: int) -> None:
        """Drops the ``count`` suffixes that were added to longest ago."""
        for _ in range(count):
            self._followers.popitem(last=False)


@dataclass(eq=False, slots=True)
class Stretch:
    """Tokens that were read after each other, and what else was read after some of them."""

    tokens: list[int] = field(default_factory=list)
    forks: dict[tuple[int, int], Stretch] = field(default_factory=dict)
    """By how many of the tokens come before the fork, and its first token."""


@dataclass(eq=False, slots=True)
class Place:
    """A point in the texts, at first their start: behind the first ``offset`` tokens of a stretch."""

    start: Stretch
    stretch: Stretch = field(init=False)
    offset: int = 0

    def __post_init__(self) -> None:
        self.stretch = self.start

    def pass_by(self, text: Sequence[int]) -> int:
        """Moves as far along ``text`` as somebody read before; answers how many tokens that is."""
        done = 0
        while True:
            ahead = self.stretch.tokens[self.offset : self.offset + len(text) - done]
            same = _common_prefix(ahead, text[done : done + len(ahead)])
            done, self.offset = done + same, self.offset + same
            fork = self.stretch.forks.get((self.offset, text[done])) if done < len(text) else None
            if fork is None:
                return done
            self.stretch, self.offset = fork, 0

    def read(self, token: int) -> None:
        """Moves one token further."""
        tokens, offset = self.stretch.tokens, self.offset
        if offset == len(tokens):
            tokens.append(token)
        elif tokens[offset] != token:
            forks = self.stretch.forks
            fork = forks.get((offset, token))
            if fork is None:
                fork = forks[offset, token] = Stretch([token])
            self.stretch, offset = fork, 0
        self.offset = offset + 1


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Of two sequences of one length."""
    if left == right:
        return len(left)
    return next(index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
