"""Estimates of acceptance probabilities, learned from verified drafts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.scheduler.draft import EMPTY_DRAFT, Draft

_MIN_LOG_ODDS, _MAX_LOG_ODDS, _BINS_PER_UNIT = -5.0, 6.0, 2
"""Bins of predicted probabilities: lowest and highest log-odds, and bins per unit."""
_RESOLUTION = 1024
_CONFIDENCE = 0.7
"""Factor on the predicted log-odds at first: drafters are overconfident more often than not."""
_PRIOR_COUNT, _MAX_COUNT = 8.0, 128.0
"""Draft tokens of a bin that the initial estimate counts for, and after which older ones are forgotten."""
_BRANCHES, _STEPS = 48.0, 8
"""Drafts, and steps, after which older ones are forgotten: branches differ, and last for many steps."""


def _find_bin(prob: float) -> int:
    prob = min(max(prob, 1e-6), 1 - 1e-6)
    odds = min(max(math.log(prob / (1 - prob)), _MIN_LOG_ODDS), _MAX_LOG_ODDS)
    return round((odds - _MIN_LOG_ODDS) * _BINS_PER_UNIT)


_BINS = [_find_bin((index + 0.5) / _RESOLUTION) for index in range(_RESOLUTION)] + [_find_bin(1.0)]


class AcceptanceCalibrator:
    """Calibrates a drafter's predicted acceptance probabilities: observed acceptance by bin of prediction."""

    def __init__(self) -> None:
        odds = [_CONFIDENCE * (_MIN_LOG_ODDS + index / _BINS_PER_UNIT) for index in range(_find_bin(1.0) + 1)]
        self._rates = [1 / (1 + math.exp(-each)) for each in odds]
        self._counts = [_PRIOR_COUNT] * len(odds)

    def trim(self, draft: Draft, min_prob: float) -> Draft:
        """Return the draft tokens that are accepted, with all before them, with a probability of at least
        ``min_prob``."""
        rates, path_prob = self._rates, 1.0
        if draft.is_chain:
            for count, prob in enumerate(draft.probs):
                path_prob *= rates[_BINS[int(prob * _RESOLUTION)]]
                if path_prob < min_prob:
                    return Draft.chain(draft.tokens[:count], draft.probs[:count]) if count else EMPTY_DRAFT
            return draft
        # The root is the last of the paths.
        paths, kept = [1.0] * (len(draft) + 1), []
        for index, (parent, prob) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            paths[index] = path_prob = paths[parent] * rates[_BINS[int(prob * _RESOLUTION)]]
            if path_prob >= min_prob:
                kept.append(index)
        return draft if len(kept) == len(draft) else draft.select(kept) if kept else EMPTY_DRAFT

    def learn(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Learn from a verified draft. Only tokens whose parents were accepted count."""
        reached = {-1, *accepted}
        for index, (parent, prob) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            if parent in reached:
                bin_index = _BINS[int(prob * _RESOLUTION)]
                self._counts[bin_index] = weight = min(_MAX_COUNT, self._counts[bin_index] + 1)
                self._rates[bin_index] += ((index in reached) - self._rates[bin_index]) / weight


class AcceptanceByDepth:
    """Estimates how many consecutive draft tokens are accepted."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        """Share of the branches with at least 1, 2, … accepted tokens; never rising."""
        self._weights: list[float] = []

    def copy(self) -> AcceptanceByDepth:
        """Return a copy whose observations have little weight."""
        other = AcceptanceByDepth()
        other._shares, other._weights = list(self._shares), [min(each, _BRANCHES / 4) for each in self._weights]
        return other

    def gain(self, depth: int) -> float:
        """Return the mean number of accepted tokens of drafts of ``depth``.

        Beyond the deepest verified draft the last ratio continues; without any, every second token is accepted.
        """
        shares, gain, last, ratio = self._shares, 0.0, 1.0, 0.5
        for level in range(depth):
            if level < len(shares):
                ratio = shares[level] / last if last else 0.0
                last = shares[level]
            else:
                last *= ratio
            gain += last
        return gain

    def learn(self, depth: int, accepted: Iterable[int], branches: int) -> None:
        """Learn from drafts of ``depth`` for ``branches`` branches; ``accepted``: the numbers of accepted tokens,
        without those of branches that had no draft."""
        counts = [0] * depth
        for number in accepted:
            for level in range(min(number, depth)):
                counts[level] += 1
        for level, count in enumerate(counts):
            if level == len(self._shares):
                self._shares.append(0.0)
                self._weights.append(0.0)
            self._weights[level] = weight = min(max(_BRANCHES, _STEPS * branches), self._weights[level]) + branches
            self._shares[level] += (count / branches - self._shares[level]) * branches / weight
            if level and self._shares[level] > self._shares[level - 1]:
                self._shares[level] = self._shares[level - 1]
