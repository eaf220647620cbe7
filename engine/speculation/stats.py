"""What guessing did, counted as it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.scheduler.timings import Histogram
from engine.speculation.control.controller import DraftOutcome

_SIZES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Upper bounds of the buckets of numbers of guesses."""


class SpeculationStats:
    """The guesses of one model's drafter. One thread counts; others may read and see about now."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        """Its kind."""
        self.seconds = 0.0
        """Spent on drafting."""
        self._sizes: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()

    @property
    def drafted(self) -> int:
        """Guesses that were computed."""
        return _sum(self._sizes)

    @property
    def accepted(self) -> int:
        """Those of them that were right and spared a step."""
        return _sum(self._lengths)

    @property
    def draft_sizes(self) -> Histogram:
        """Guesses computed for a branch in a step that it was due a token in, 0 included: what the controller chose."""
        return _histogram(self._sizes)

    @property
    def accepted_lengths(self) -> Histogram:
        """Right ones among the guesses of a branch in a step, where there were any guesses."""
        return _histogram(self._lengths)

    def record_step(self, due: int, outcomes: Sequence[DraftOutcome], seconds: float) -> None:
        """Counts a step in which ``due`` branches might have had guesses, and ``seconds`` of drafting."""
        self.seconds += seconds
        self._sizes[0] += due - len(outcomes)
        for _, draft, right in outcomes:
            self._sizes[len(draft.tokens)] += 1
            self._lengths[len(right)] += 1


def _sum(counted: Counter[int]) -> int:
    return sum(number * times for number, times in list(counted.items()))


def _histogram(counted: Counter[int]) -> Histogram:
    histogram = Histogram(_SIZES)
    for number, times in list(counted.items()):
        histogram.observe(number, times)
    return histogram
