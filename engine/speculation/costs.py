"""What steps cost beside each other, learned from a few that were compared."""

from __future__ import annotations

import math
from typing import NamedTuple

_RATE = 0.4
"""What a new comparison counts for, once there were some."""
_TIMES = 8
"""Comparisons beyond which more of them do not make what is known of a size more credible."""


class Size(NamedTuple):
    """What is asked for a branch."""

    depth: int
    """Guesses after each other."""
    nodes: int
    """Guesses in all: ``depth`` for a chain."""


NONE = Size(0, 0)


class Costs:
    """The time of a step by what is asked for its branches, in plain steps of the same number of branches."""

    def __init__(self) -> None:
        self.known: dict[Size, float] = {NONE: 1.0}
        self._times: dict[Size, int] = {}
        self.guess = 0.0
        """Of computing one guess."""
        self._guesses = 0

    def copy(self, size: Size) -> Costs:
        """What is known now of one size, to be corrected soon."""
        other = Costs()
        other.known[size] = self.at(size)
        other.guess, other._guesses = self.guess, min(self._guesses, 1)
        return other

    def at(self, size: Size) -> float:
        """What a step costs: as measured, else in proportion to the measured one that is most like it."""
        if size in self.known:
            return self.known[size]
        others = [other for other in self.known if other.depth]
        if not others:
            return 1.0
        like = min(
            others, key=lambda one: abs(math.log(one.depth / size.depth)) + abs(math.log(one.nodes / size.nodes))
        )
        return 1 + max(0.0, self.known[like] - 1) * (1 + size.nodes) / (1 + like.nodes)

    def learn(self, size: Size, beside: Size, ratio: float) -> None:
        """A step of ``size`` took ``ratio`` times as long as one of ``beside``, which is known."""
        times = self._times.setdefault(size, 0), self._times.setdefault(beside, 0)
        if size not in self.known:
            self.known[size] = self.known[beside] * ratio
        else:
            wrong = math.log(ratio * self.known[beside] / self.known[size]) * max(_RATE, 1 / (1 + max(times)))
            if NONE in (size, beside):
                # Plain steps are the measure: this is how much more any guesses cost.
                factor = math.exp(wrong if beside == NONE else -wrong)
                self.known = {each: cost * factor if each.depth else cost for each, cost in self.known.items()}
            else:
                # Of two sizes the one that is known less is corrected more.
                part = (1 + times[1]) / (2 + sum(times))
                self.known[size] *= math.exp(part * wrong)
                self.known[beside] *= math.exp((part - 1) * wrong)
        for each in (size, beside):
            self._times[each] = min(_TIMES, self._times[each] + 1)

    def learn_guess(self, cost: float) -> None:
        """Computing one guess took ``cost`` plain steps."""
        self._guesses += 1
        self.guess += (max(0.0, cost) - self.guess) * max(_RATE, 1 / self._guesses)


def bucket(branches: int) -> int:
    """Counts up to 8 apart, larger ones four to a doubling."""
    return branches if branches <= 8 else 8 + int(4 * math.log2(branches / 8))
