"""What steps of one size cost beside those of another: a few of both, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.speculation.control.cost_model import NONE, DraftSize, StepCostModel

_LEAD = 8
"""Steps as before that begin a comparison."""
_LEAST, _MOST = 5, 24
"""Steps of the other size that are believed: until it is clear which is faster, and at most."""
_CLEAR = 0.2
"""How much faster or slower makes that clear."""
_LOSS, _WORST = 3.0, 20.0
"""Usual steps after whose loss nobody waits until it is: of steps that are believed, and of all."""
_DEAREST = 4.0
"""Usual steps that one step of the other size is believed to have lost, at most."""
_PASSED = 64
"""Steps of other numbers of branches that a comparison waits for."""
_ODD = 2.0
"""Steps that take so many times as long as others like them were interrupted, and count as if they took just that."""
_FIRSTS = 8
"""Steps that do something for the first times, of which so many do not count. Where there are always more, that is what
they cost."""


class _Step(NamedTuple):
    seconds: float
    """Drafting included."""
    alone: float
    """Without it."""
    guesses: int
    """That were computed, and drafts: what these cost beside is about as much as one guess more."""


@dataclass(slots=True)
class StepCostTrial:
    """Some steps as usual, then some of another size."""

    usual: DraftSize
    size: DraftSize
    branches: int
    """Of its steps, about. Others do not count."""
    pace: float
    """Tokens of a branch in a usual step."""
    settling: int = 4
    """Steps of the other size that are not believed: memory of a new size is taken, the caches are full of other
    things, and a drafter makes up for what it has missed."""
    part: float = 1.0
    """Of the branches: those that are asked for the other size, where usually there are no guesses."""
    lost: float = 0.0
    """By the steps of the other size, in usual ones; negative where they gained."""
    _spent: float = 0.0
    """Usual steps' time since it settled, and what was made in it, in usual steps' tokens."""
    _made: float = 0.0
    _passed: int = 0
    """Steps of other numbers of branches since it began."""
    _firsts: int = 0
    """Steps that did not count."""
    _before: list[_Step] = field(default_factory=list)
    _after: list[_Step] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether the next step is of the other size."""
        return len(self._before) >= _LEAD

    @property
    def over(self) -> bool:
        """Whether there is enough of it."""
        believed, won = self.steps - self.settling, self._made - self._spent
        clear = believed >= _LEAST and abs(won) > _CLEAR * self.part * self._spent
        dear = won < -_LOSS or self.lost > _WORST
        return clear or dear or believed >= _MOST or self._passed > _PASSED

    @property
    def steps(self) -> int:
        """Of the other size."""
        return len(self._after)

    @property
    def enough(self) -> bool:
        """Whether it tells what the other size costs."""
        return self.steps > self.settling + 1

    def is_about(self, branches: int) -> bool:
        """Whether steps of so many branches count."""
        return 8 * abs(branches - self.branches) <= self.branches

    def passes(self) -> None:
        """A step of another number of branches went by."""
        self._passed += 1

    def disbelieves(self) -> bool:
        """Whether a step that did something for the first times is left out."""
        self._firsts += 1
        return self._firsts <= _FIRSTS

    def add(self, drafting: float, step: float, guesses: int, drafts: int, won: float) -> None:
        """A step took ``step`` seconds and drafting ``drafting``, for so many guesses in so many drafts; ``won``: those
        that were accepted, for each branch of the step."""
        if self.begun:
            spent = (drafting + step) / _usual([each.seconds for each in self._before])
            made = (1 + won) / self.pace
            self.lost += min(_DEAREST, spent - made)
            if len(self._after) >= self.settling:
                self._spent += spent
                self._made += made
        (self._after if self.begun else self._before).append(_Step(drafting + step, step, guesses + drafts))

    def conclude(self, costs: StepCostModel) -> None:
        """Learns from a comparison that is over."""
        before, after = self._before, self._after[self.settling :]
        if not self.enough:
            if not self._after:
                return
            # It ended early, and some of it may have been interrupted, or have made up for something.
            after = [min(self._after)]
        ratio = _usual([each.seconds for each in after]) / _usual([each.seconds for each in before])
        # What only a part of the branches had is taken to cost as much for each of the others, and so are errors.
        costs.learn(self.size, self.usual, max(0.1, 1 + (ratio - 1) / self.part), sure=self.part == 1)
        if NONE in (self.usual, self.size):
            with_guesses, plain = (after, before) if self.usual == NONE else (before, after)
            if guesses := statistics.mean(each.guesses for each in with_guesses):
                steps = [_usual([each.alone for each in some]) for some in (with_guesses, plain)]
                costs.learn_guess((steps[0] / steps[1] - 1) / guesses)


def _usual(seconds: Sequence[float]) -> float:
    """The mean without interruptions."""
    most = _ODD * statistics.median_low(seconds)
    return sum([min(each, most) for each in seconds]) / len(seconds)
