"""Estimates of acceptance probabilities, learned from verified drafts."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.draft import EMPTY_DRAFT, Draft

_NUM_BINS = 16
"""Bins of predicted probabilities, equally wide."""
_OVERCONFIDENCE = 0.7
"""Factor on the predicted log-odds at first: drafters are overconfident more often than not."""
_PRIOR_COUNT, _MAX_COUNT = 8.0, 128.0
"""Draft tokens of a bin that the initial estimate counts for, and after which older ones are forgotten."""
_MIN_DRAFTS, _MIN_STEPS = 48.0, 8
"""Drafts, and steps, after which older ones are forgotten: branches differ, and last for many steps."""


class AcceptanceCalibrator:
    """Calibrates a drafter's predicted acceptance probabilities: observed acceptance by bin of prediction."""

    def __init__(self) -> None:
        middles = [(index + 0.5) / _NUM_BINS for index in range(_NUM_BINS)]
        self._rates = [1 / (1 + (1 / prob - 1) ** _OVERCONFIDENCE) for prob in middles]
        self._counts = [_PRIOR_COUNT] * _NUM_BINS

    def trim(self, draft: Draft, min_prob: float) -> Draft:
        """Return the draft tokens that are accepted, with all before them, with probability ``min_prob`` or more."""
        # The root is the last of the paths.
        paths, kept = [1.0] * (len(draft) + 1), []
        for index, (parent, prob) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            paths[index] = paths[parent] * self._rates[_bin(prob)]
            if paths[index] >= min_prob:
                kept.append(index)
        return draft if len(kept) == len(draft) else draft.select(kept) if kept else EMPTY_DRAFT

    def learn(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Learn from a verified draft. Only tokens whose parents were accepted count."""
        reached = {-1, *accepted}
        for index, (parent, prob) in enumerate(zip(draft.parents, draft.probs, strict=True)):
            if parent in reached:
                bin_index = _bin(prob)
                self._counts[bin_index] = count = min(_MAX_COUNT, self._counts[bin_index] + 1)
                self._rates[bin_index] += ((index in reached) - self._rates[bin_index]) / count


def _bin(prob: float) -> int:
    return min(int(prob * _NUM_BINS), _NUM_BINS - 1)


class AcceptanceByDepth:
    """Smoothed share of the branches with at least 1, 2, … accepted draft tokens."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        """Never rising."""
        self._weights: list[float] = []

    def fade(self) -> None:
        """Reduce the weight of the observations so far."""
        self._weights = [min(weight, _MIN_DRAFTS / 4) for weight in self._weights]

    def expected(self, depth: int) -> float:
        """Return the mean number of accepted tokens of drafts of ``depth``.

        Beyond the deepest verified draft the last ratio continues; without any, every second token is accepted.
        """
        total, share, ratio = 0.0, 1.0, 0.5
        for level in range(depth):
            if level < len(self._shares):
                ratio = self._shares[level] / share if share else 0.0
            share *= ratio
            total += share
        return total

    def learn(self, depth: int, num_accepted: Sequence[int], branches: int) -> None:
        """Learn from drafts of ``depth`` for ``branches`` branches, of which ``len(num_accepted)`` had a draft."""
        for level in range(depth):
            if level == len(self._shares):
                self._shares.append(0.0)
                self._weights.append(0.0)
            share = sum([number > level for number in num_accepted]) / branches
            self._weights[level] = weight = (
                min(max(_MIN_DRAFTS, _MIN_STEPS * branches), self._weights[level]) + branches
            )
            share = self._shares[level] + (share - self._shares[level]) * branches / weight
            self._shares[level] = min(share, self._shares[level - 1]) if level else share
