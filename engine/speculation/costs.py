"""What steps and drafting cost, learned from those that ran."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

_KNEE = 32.0
"""Before anything is measured, a step is thought to cost as much as this many tokens and each of its own."""
_MATURE = 5
"""Measurements after which a mean that forgets replaces their median."""
_RATE = 1 / 32
_DOUBTS = 3
"""Measurements of a new size that must agree before it is believed to cost much more than it should."""
_FIRM = 32
"""Measurements beyond which more of them do not make one of two sizes more credible than the other."""
_SMOOTHED = 8
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

    It rises: where a larger size was measured to cost less than a smaller one, both are taken to cost the mean
    (isotonic regression by pooling adjacent violators). Between measured sizes it is linear. Beyond them it has a given
    shape, or goes on as straight as it last went if that is less: what may be cheap must be tried to be known. What was
    not measured for long is forgotten for the same reason.
    """

    def __init__(self, shape: Callable[[float], float], *, exact: int, octave: int, slack: float) -> None:
        """``shape``: how seconds grow where nothing was measured, up to a factor. Sizes up to ``exact`` are kept apart,
        larger ones fall into ``octave`` buckets per doubling. ``slack``: how far, relative to what is known, a single
        measurement is believed to be off."""
        self._shape = shape
        self._exact, self._octave, self._slack = exact, octave, slack
        self._keys: list[int] = []
        """Of the cells, rising; and what ``at`` needs of them, as of a few measurements ago."""
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._cells: list[_Cell] = []
        self._doubted: dict[int, list[float]] = {}
        self._measured = 0

    @property
    def last(self) -> float:
        """The largest size that is known, 0 if none is."""
        return self._sizes[-1] if self._sizes else 0.0

    def at(self, size: float) -> float:
        """What a size costs."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return self._shape(size)
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return self._beyond(size)
        if sizes[place] == size:
            return seconds[place]
        if place == 0:
            return seconds[0] * self._shape(size) / self._shape(sizes[0])
        share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * share

    def learn(self, size: int, seconds: float) -> float:
        """Takes a measurement in; answers by what part of what was known of the size it was off, as far as that is
        believed; 0 if little was known."""
        self._measured += 1
        if self._measured % _AGE == 0:
            self._forget()
        elif self._measured % _SMOOTHED == 0:
            self._smooth()
        key = self._key(size)
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            first = self._doubted.pop(key, [])
            first.append(seconds)
            if len(first) < _DOUBTS and self._keys and seconds > 1.5 * self.at(size):
                # Whatever runs for the first time may compile, allocate or catch up: it gets another chance.
                self._doubted[key] = first
                return 0.0
            cell = _Cell(size, statistics.median_low(first), first, len(first), self._measured)
            self._keys.insert(place, key)
            self._cells.insert(place, cell)
            self._smooth()
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
            self._smooth()
        return surprise

    def _forget(self) -> None:
        kept = [place for place, cell in enumerate(self._cells) if self._measured - cell.last < _AGE]
        self._keys = [self._keys[place] for place in kept]
        self._cells = [self._cells[place] for place in kept]
        self._doubted.clear()
        self._smooth()

    def _smooth(self) -> None:
        """Brings what ``at`` reads up to date."""
        self._sizes = [cell.size for cell in self._cells]
        pools: list[tuple[float, int, int]] = []
        for cell in self._cells:
            mean, weight, cells = cell.seconds, min(cell.count, _FIRM), 1
            while pools and pools[-1][0] > mean:
                other, more, others = pools.pop()
                mean = (mean * weight + other * more) / (weight + more)
                weight, cells = weight + more, cells + others
            pools.append((mean, weight, cells))
        self._seconds = [mean for mean, _, cells in pools for _ in range(cells)]

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
            # Until steps like it were measured, it is taken to cost what branches without prompts or trees do.
            shape = _affine if kind is Kind.CHAIN else self.steps(Kind.CHAIN, branches).at
            exact, octave = (1, 2) if kind is Kind.MIXED else (16, 4)
            row = self._rows[place] = Curve(shape, exact=exact, octave=octave, slack=0.2)
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

    @property
    def drafted(self) -> bool:
        """Whether it is known what any guesses cost."""
        return any(curve.last for curve in self._drafting.values())

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


def bucket(count: int) -> int:
    """Counts up to 4 apart, larger ones two to a doubling."""
    return count if count <= 4 else 4 + int(2 * math.log2(count / 4))


def _affine(tokens: float) -> float:
    return _KNEE + tokens
