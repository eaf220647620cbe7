"""Statistics of speculative decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.scheduler.timings import Histogram
from engine.speculation.control.controller import DraftOutcome

_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Upper bounds of the buckets of numbers of draft tokens."""


class SpeculationStats:
    """Statistics of one model's drafter. One thread writes; others may read approximate values."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        """Kind of the drafter."""
        self.seconds = 0.0
        """Seconds spent on drafting."""
        self._sizes: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()

    @property
    def drafted(self) -> int:
        """Number of draft tokens that were verified."""
        return _sum_counted(self._sizes)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens, each of which saved a step."""
        return _sum_counted(self._lengths)

    @property
    def draft_sizes(self) -> Histogram:
        """Draft tokens verified per branch and decoding step, 0 included."""
        return _build_histogram(self._sizes)

    @property
    def accepted_lengths(self) -> Histogram:
        """Draft tokens accepted per branch and step that had a draft."""
        return _build_histogram(self._lengths)

    def record_step(self, num_candidates: int, outcomes: Sequence[DraftOutcome], seconds: float) -> None:
        """Record a step with ``num_candidates`` branches that could have had drafts, and ``seconds`` of drafting."""
        self.seconds += seconds
        self._sizes[0] += num_candidates - len(outcomes)
        for _, draft, accepted in outcomes:
            self._sizes[len(draft.tokens)] += 1
            self._lengths[len(accepted)] += 1


def _sum_counted(counted: Counter[int]) -> int:
    return sum(number * times for number, times in list(counted.items()))


def _build_histogram(counted: Counter[int]) -> Histogram:
    histogram = Histogram(_BOUNDS)
    for number, times in list(counted.items()):
        histogram.observe(number, times)
    return histogram
