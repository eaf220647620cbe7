"""What steps cost beside each other, learned from a few that were compared."""

from __future__ import annotations

from typing import NamedTuple

_DRAFTING = 4.0
"""Guesses that take as long as what drafting costs however much is drafted, where nothing tells."""
_RATE = 0.2
"""What a new comparison counts for, once there were some."""


class DraftSize(NamedTuple):
    """What is asked for a branch."""

    depth: int
    """Guesses after each other."""
    nodes: int
    """Guesses in all: ``depth`` for a chain."""

    @property
    def is_tree(self) -> bool:
        """Whether some of the guesses are alternatives."""
        return self.nodes > self.depth


NONE = DraftSize(0, 0)


class StepCostModel:
    """The time of a step by what is asked for its branches, in plain steps of the same number of branches."""

    def __init__(self) -> None:
        self.known: dict[DraftSize, float] = {NONE: 1.0}
        """As measured."""
        self._believed = self.known
        """As measured for about as many branches: until something is."""
        self._times: dict[DraftSize, int] = {}
        self.guess = 0.0
        """Of computing one guess."""
        self._guesses = 0

    def copy(self) -> StepCostModel:
        """What is to be believed of steps of other numbers of branches."""
        other = StepCostModel()
        other._believed = dict(self._present)
        other.guess, other._guesses = self.guess, min(self._guesses, 1)
        return other

    @property
    def _present(self) -> dict[DraftSize, float]:
        return self.known if len(self.known) > 1 else self._believed

    def at(self, size: DraftSize) -> float:
        """What a step costs: as measured, else on the line through the next smaller and larger size that were measured.
        Where one of them is missing it is in proportion to the other."""
        known = self._present
        if size in known:
            return known[size]
        others = sorted(other for other in known if other.depth)
        # Chains tell most of chains.
        others = [other for other in others if other.is_tree == size.is_tree] or others
        below = next((other for other in reversed(others) if other.nodes <= size.nodes), None)
        above = next((other for other in others if other.nodes > size.nodes), None)
        if below is not None and above is not None:
            part = (size.nodes - below.nodes) / (above.nodes - below.nodes)
            return (1 - part) * known[below] + part * known[above]
        like = below or above
        if like is None:
            return 1.0
        return 1 + max(0.0, known[like] - 1) * (_DRAFTING + size.nodes) / (_DRAFTING + like.nodes)

    def learn(self, size: DraftSize, beside: DraftSize, ratio: float, *, sure: bool) -> None:
        """A step of ``size`` took ``ratio`` times as long as one of ``beside``, which is known. Unless that is
        ``sure``, the next that is measured counts for more."""
        cost = self.known.setdefault(beside, self.at(beside)) * ratio
        if size == NONE:
            # Plain steps are the measure: this is how much more any guesses cost, unless it is the size that was wrong.
            times = self._times.get(beside, 0)
            wrong = cost ** -self._rate(beside)
            for other in self.known:
                if other.depth:
                    alike = other == beside or other not in self._times
                    self.known[other] *= wrong if alike else wrong ** (times / (1 + times))
        else:
            was = self.known.setdefault(size, cost)
            self.known[size] = was * (cost / was) ** self._rate(size, counts=sure)

    def learn_guess(self, cost: float) -> None:
        """Computing one guess took ``cost`` plain steps."""
        self._guesses += 1
        self.guess += (max(0.0, cost) - self.guess) * max(_RATE, 1 / self._guesses)

    def _rate(self, size: DraftSize, *, counts: bool = True) -> float:
        times = self._times.get(size, 0) + 1
        if counts:
            self._times[size] = times
        return max(_RATE, 1 / times)


def bucket(branches: int) -> int:
    """The next power of two. Numbers of branches that come and go one by one should not differ: what is guessed for
    them for a few steps at a time does not pay."""
    return 1 << (branches - 1).bit_length()
