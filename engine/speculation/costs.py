"""What steps and drafting cost, learned from those that ran."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

_KNEE = 32.0
"""Before anything is measured, a step is thought to cost as much as this many tokens and each of its own."""
_FEW = 3
"""Sizes that must be known of steps to conclude anything about others."""
_MATURE = 5
"""Measurements after which a mean that forgets replaces their median."""
_RATE = 1 / 32
_DOUBTS = 3
"""Measurements of a new size that must agree before it is believed to cost much more than it should."""
_AGE = 4000
"""Measurements after which one of another size is forgotten."""
_PACE_RATE = 1 / 10


class Kind(Enum):
    """Steps that cost differently for the same number of tokens."""

    CHAIN = auto()
    """Branches with at most one guess after each token."""
    TREE = auto()
    MIXED = auto()
    """With prompts."""


@dataclass(slots=True)
class _Cell:
    """What is known of about one size."""

    size: float
    seconds: float
    first: list[float]
    """Measurements while they are few."""
    count: int
    last: int
    """Number of the latest measurement."""


class Curve:
    """Seconds as a function of a size, from measurements that are noisy and grow old.

    Between measured sizes it is linear. Beyond them it has a given shape, or goes on as straight as it last went if
    that is less: what may be cheap must be tried to be known. What was not measured for long is forgotten for the same
    reason.
    """

    def __init__(self, shape: Callable[[float], float], *, exact: int, octave: int, slack: float) -> None:
        """``shape``: how seconds grow where nothing was measured, up to a factor. Sizes up to ``exact`` are kept apart,
        larger ones fall into ``octave`` buckets per doubling. ``slack``: how far, relative to what is known, a single
        measurement is believed to be off."""
        self._shape = shape
        self._exact, self._octave, self._slack = exact, octave, slack
        self._keys: list[int] = []
        """Of the cells, rising; and what ``at`` needs of them."""
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._cells: list[_Cell] = []
        self._doubted: dict[int, list[float]] = {}
        self._measured = 0

    def __len__(self) -> int:
        """Sizes that are known."""
        return len(self._keys)

    @property
    def first(self) -> float:
        """The smallest size that is known, 0 if none is."""
        return self._sizes[0] if self._sizes else 0.0

    @property
    def last(self) -> float:
        """The largest size that is known, 0 if none is."""
        return self._sizes[-1] if self._sizes else 0.0

    def at(self, size: float) -> float:
        """What a size costs."""
        sizes = self._sizes
        if not sizes:
            return self._shape(size)
        if size > sizes[-1]:
            return self._beyond(size)
        if size < sizes[0]:
            return self._seconds[0] * self._shape(size) / self._shape(sizes[0])
        return self.inside(size)

    def inside(self, size: float) -> float:
        """What a size costs, or the nearest size that is known."""
        sizes, seconds = self._sizes, self._seconds
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return seconds[-1]
        if place == 0 or sizes[place] == size:
            return seconds[place]
        share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * share

    def learn(self, size: int, seconds: float) -> float:
        """Takes a measurement in; answers by what part of what was known of the size it was off, as far as that is
        believed; 0 if little was known."""
        self._measured += 1
        if self._measured % _AGE == 0:
            self._forget()
        key = self._key(size)
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            first = self._doubted.pop(key, [])
            first.append(seconds)
            if len(first) < _DOUBTS and self and seconds > 1.5 * self.at(size):
                # Whatever runs for the first time may compile, allocate or catch up: it gets another chance.
                self._doubted[key] = first
                return 0.0
            cell = _Cell(size, statistics.median_low(first), first, len(first), self._measured)
            self._keys.insert(place, key)
            self._cells.insert(place, cell)
            self._sizes.insert(place, cell.size)
            self._seconds.insert(place, cell.seconds)
            return 0.0
        return self._update(place, size, seconds)

    def _update(self, place: int, size: int, seconds: float) -> float:
        cell = self._cells[place]
        surprise = 0.0
        cell.count += 1
        cell.last = self._measured
        rate = max(_RATE, 1 / cell.count)
        cell.size += (size - cell.size) * rate
        if len(cell.first) == _MATURE:
            surprise = max(-self._slack, min(self._slack, seconds / cell.seconds - 1))
            cell.seconds *= 1 + surprise * rate
        else:
            cell.first.append(seconds)
            cell.seconds = statistics.median_low(cell.first)
        self._sizes[place], self._seconds[place] = cell.size, cell.seconds
        return surprise

    def _forget(self) -> None:
        kept = [place for place, cell in enumerate(self._cells) if self._measured - cell.last < _AGE]
        self._keys = [self._keys[place] for place in kept]
        self._cells = [self._cells[place] for place in kept]
        self._sizes = [cell.size for cell in self._cells]
        self._seconds = [cell.seconds for cell in self._cells]
        self._doubted.clear()

    def _beyond(self, size: float) -> float:
        last, seconds = self._sizes[-1], self._seconds[-1]
        shaped = seconds * self._shape(size) / self._shape(last)
        if len(self._sizes) == 1:
            return shaped
        slope = max(0.0, (seconds - self._seconds[-2]) / (last - self._sizes[-2]))
        # What is straight is believed up to twice the size; so it takes few steps to find out that it is not.
        double = min(size, 2 * last)
        straight = seconds + slope * (double - last)
        return min(shaped, straight * self._shape(size) / self._shape(double))

    def _key(self, size: int) -> int:
        if size <= self._exact:
            return size
        return self._exact + 1 + int(self._octave * math.log2(size / self._exact))


class Costs:
    """Seconds of a step by what is in it, and of drafting.

    All of them are relative to ``pace``, which follows what makes everything slower or faster together: other work on
    the machine, longer contexts.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._rows: dict[tuple[Kind, int], Curve] = {}
        self._drafting: dict[int, Curve] = {}
        self._plain: dict[int, int] = {}

    def steps(self, kind: Kind, branches: int) -> Curve:
        """The cost of a step by its tokens."""
        place = kind, 0 if kind is Kind.MIXED else bucket(branches)
        row = self._rows.get(place)
        if row is None:
            if kind is Kind.CHAIN:
                row = Curve(partial(self._like, place[1]), exact=16, octave=4, slack=0.2)
            elif kind is Kind.TREE:
                row = Curve(self.steps(Kind.CHAIN, branches).at, exact=16, octave=4, slack=0.2)
            else:
                row = Curve(partial(self._like, bucket(branches)), exact=1, octave=2, slack=0.2)
            self._rows[place] = row
        return row

    def drafting(self, branches: int, depth: int) -> float:
        """What it costs to guess so deep for so many branches: nothing until it was tried. Depth 0 is what a drafter
        does in every step."""
        place = bucket(branches)
        row = self._drafting.get(place)
        if depth and (row is None or not row.last):
            known = [other for other, curve in self._drafting.items() if curve.last]
            row = self._drafting[min(known, key=lambda other: abs(other - place))] if known else None
        return row.at(depth) if row is not None else 0.0

    def plain(self, branches: int) -> int:
        """Steps without guesses that were measured with about so many branches."""
        return self._plain.get(bucket(branches), 0)

    def learn_step(self, kind: Kind, branches: int, tokens: int, seconds: float) -> None:
        """A step took ``seconds``."""
        # The same surprise moves both, so that neither drifts against the other.
        self.pace *= 1 + self.steps(kind, branches).learn(tokens, seconds / self.pace) * _PACE_RATE
        if kind is Kind.CHAIN and tokens == branches:
            place = bucket(branches)
            self._plain[place] = self._plain.get(place, 0) + 1

    def learn_drafting(self, branches: int, depth: int, seconds: float) -> None:
        """Drafting took ``seconds``."""
        place = bucket(branches)
        row = self._drafting.get(place)
        if row is None:
            # Now and then a drafter has much to catch up with. That is part of its price.
            row = self._drafting[place] = Curve(lambda depth: 1 + depth, exact=64, octave=4, slack=4.0)
        row.learn(depth, seconds / self.pace)

    def _like(self, place: int, tokens: float) -> float:
        """What a step costs with about as many branches, as far as that was measured."""
        known = [other for (kind, other), row in self._rows.items() if kind is Kind.CHAIN and len(row) >= _FEW]
        others = [other for other in known if other != place]
        if not others:
            return _KNEE + tokens
        row = self._rows[Kind.CHAIN, min(others, key=lambda other: abs(other - place))]
        return row.inside(tokens) * (_KNEE + tokens) / (_KNEE + min(max(tokens, row.first), row.last))


def bucket(count: int) -> int:
    """Counts up to 4 apart, larger ones two to a doubling."""
    return count if count <= 4 else 4 + int(2 * math.log2(count / 4))
