"""What steps of one size cost beside those of another: a few of both, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.speculation.costs import NONE, Costs, Size

LEAD, SETTLING, SEEN = 6, 2, 6
"""Steps of a comparison: as before, otherwise but not believed (memory of a new size is taken, what is done in it is
recorded, the caches are full of other things), and otherwise."""
_ODD = 2.0
"""Steps that take so many times as long as others like them were interrupted."""
_ENOUGH, PRICE = 1.0, 3.0
"""Plain steps after whose loss a trial ends early: when some of it is believed, and before."""
_BELIEVED = 4
"""Steps that are believed without those that settled."""
_FIRSTS = 8
"""Steps that do something for the first times, of which so many do not count. Where there are always more, that is what
they cost."""
_WORST, _DEAREST = 1.0, 20.0
"""Plain steps that one step of a trial is believed to have lost, at most: of what trials always lose, and of what this
one did. Much of that is done for the first times, or makes up for what a drafter has missed."""


@dataclass(slots=True)
class Comparison:
    """Some steps as usual, then some of another size; a trial if there are usually no guesses."""

    usual: Size
    size: Size
    part: float = 1.0
    """Of the branches: those that get guesses in a trial."""
    settling: int = SETTLING
    """Steps of the other size that are not believed."""
    lost: float = 0.0
    """In plain steps, by a trial as it should be."""
    paid: float = 0.0
    """And by this one."""
    _firsts: int = 0
    """Steps that did not count."""
    _seconds: list[float] = field(default_factory=list)
    """Of all steps, drafting included."""
    _alone: list[float] = field(default_factory=list)
    """Without it."""
    _guesses: list[float] = field(default_factory=list)
    """That were computed in each of them, and what a draft costs beside them: about as much as one more."""

    @property
    def begun(self) -> bool:
        """Whether the next step is of the other size."""
        return len(self._seconds) >= LEAD

    @property
    def over(self) -> bool:
        """Whether there is enough of it."""
        after = len(self._seconds) - LEAD
        return after == self.settling + SEEN or self.lost > (_ENOUGH if after > self.settling + 1 else PRICE)

    def disbelieves(self) -> bool:
        """Whether a step that did something for the first times is left out."""
        self._firsts += 1
        return self._firsts <= _FIRSTS

    def add(self, drafting: float, step: float, guesses: int, drafts: int, won: float) -> None:
        """A step took ``step`` seconds and drafting ``drafting``, for so many guesses in so many drafts; ``won``: those
        that were accepted, for each branch of the step."""
        if self.begun and not self.usual.depth:
            lost = (drafting + step) / _usual(self._seconds[:LEAD]) - 1 - won
            self.lost += min(_WORST, lost)
            self.paid += min(_DEAREST, lost)
        self._seconds.append(drafting + step)
        self._alone.append(step)
        self._guesses.append(guesses + drafts)

    def conclude(self, costs: Costs) -> None:
        """Learns from a comparison that is over."""
        first = LEAD + self.settling
        if len(self._seconds) < first + _BELIEVED:
            # It ended early, and may have been interrupted rather than slow.
            first = LEAD
        ratio = _usual(self._seconds[first:]) / _usual(self._seconds[:LEAD])
        # What only a part of the branches had is taken to cost as much for each of the others.
        costs.learn(self.size, self.usual, max(0.1, 1 + (ratio - 1) / self.part))
        before, after = _usual(self._alone[:LEAD]), _usual(self._alone[first:])
        if self.usual == NONE and (guesses := statistics.mean(self._guesses[first:])):
            costs.learn_guess((after / before - 1) / guesses)
        elif self.size == NONE and (guesses := statistics.mean(self._guesses[:LEAD])):
            costs.learn_guess((before / after - 1) / guesses)


def _usual(seconds: Sequence[float]) -> float:
    """The mean without interruptions."""
    most = _ODD * statistics.median_low(seconds)
    return statistics.mean(each for each in seconds if each <= most)
