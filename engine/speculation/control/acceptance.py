"""How likely guesses are to be accepted, learned from those that were computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.scheduler.draft import EMPTY_DRAFT, Draft

_LOWEST, _HIGHEST, _PER_UNIT = -5.0, 6.0, 2
"""Said chances are told apart by their log-odds: from, to, and so many bins per unit."""
_FINE = 1024
_BELIEF = 0.7
"""Part of the said log-odds that is believed at first: drafters exaggerate more often than not."""
_DOUBT, _MEMORY = 8.0, 128.0
"""Guesses of a bin that what is believed at first counts for, and after which older ones are forgotten."""
_BRANCHES, _STEPS = 48.0, 8
"""Branches' drafts, and steps, after which older ones are forgotten: branches differ, and stay for many steps."""


def _bin(chance: float) -> int:
    chance = min(max(chance, 1e-6), 1 - 1e-6)
    odds = min(max(math.log(chance / (1 - chance)), _LOWEST), _HIGHEST)
    return round((odds - _LOWEST) * _PER_UNIT)


_BINS = [_bin((index + 0.5) / _FINE) for index in range(_FINE)] + [_bin(1.0)]


class AcceptanceCalibrator:
    """The chance that a guess is accepted if the one before it is, by what the drafter says of it."""

    def __init__(self) -> None:
        odds = [_BELIEF * (_LOWEST + index / _PER_UNIT) for index in range(_bin(1.0) + 1)]
        self._right = [1 / (1 + math.exp(-each)) for each in odds]
        self._seen = [_DOUBT] * len(odds)

    def trimmed(self, draft: Draft, least: float) -> Draft:
        """The guesses that are accepted, with all before them, with a chance of ``least``."""
        right, path = self._right, 1.0
        if draft.is_chain:
            for count, chance in enumerate(draft.probs):
                path *= right[_BINS[int(chance * _FINE)]]
                if path < least:
                    return Draft.chain(draft.tokens[:count], draft.probs[:count]) if count else EMPTY_DRAFT
            return draft
        # The root is the last of the paths.
        paths, kept = [1.0] * (len(draft) + 1), []
        for index, (parent, chance) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            paths[index] = path = paths[parent] * right[_BINS[int(chance * _FINE)]]
            if path >= least:
                kept.append(index)
        return draft if len(kept) == len(draft) else draft.select(kept) if kept else EMPTY_DRAFT

    def learn(self, draft: Draft, accepted: Sequence[int]) -> None:
        """What became of a draft. Only guesses whose parents were accepted tell anything."""
        reached = {-1, *accepted}
        for index, (parent, chance) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            if parent in reached:
                said = _BINS[int(chance * _FINE)]
                self._seen[said] = seen = min(_MEMORY, self._seen[said] + 1)
                self._right[said] += ((index in reached) - self._right[said]) / seen


class AcceptanceByDepth:
    """How many guesses after each other are accepted."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        """Of the branches that were asked for, those with at least 1, 2, … accepted guesses; never rising."""
        self._seen: list[float] = []

    def copy(self) -> AcceptanceByDepth:
        """What is known now, to be forgotten soon."""
        other = AcceptanceByDepth()
        other._shares, other._seen = list(self._shares), [min(each, _BRANCHES / 4) for each in self._seen]
        return other

    def gain(self, depth: int) -> float:
        """The mean number of accepted guesses where chains or trees of ``depth`` are asked for. What lies deeper than
        was ever tried goes on as it last went; where nothing is known, one of two guesses is right."""
        shares, gain, last, ratio = self._shares, 0.0, 1.0, 0.5
        for place in range(depth):
            if place < len(shares):
                ratio = shares[place] / last if last else 0.0
                last = shares[place]
            else:
                last *= ratio
            gain += last
        return gain

    def learn(self, depth: int, accepted: Iterable[int], branches: int) -> None:
        """``branches`` were asked for chains or trees of ``depth``; the numbers that were ``accepted``, but for those
        without any guess."""
        counts = [0] * depth
        for number in accepted:
            for place in range(min(number, depth)):
                counts[place] += 1
        for place, count in enumerate(counts):
            if place == len(self._shares):
                self._shares.append(0.0)
                self._seen.append(0.0)
            self._seen[place] = seen = min(max(_BRANCHES, _STEPS * branches), self._seen[place]) + branches
            self._shares[place] += (count / branches - self._shares[place]) * branches / seen
            if place and self._shares[place] > self._shares[place - 1]:
                self._shares[place] = self._shares[place - 1]
