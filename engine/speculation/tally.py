"""What guessing did, counted as it happens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.controller import Outcome
from engine.timings import Histogram

_SIZES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Upper bounds of the buckets of numbers of guesses."""


class Tally:
    """The guesses of one model's drafter. One thread counts; others may read and see about now."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        """Its kind."""
        self.drafted = 0
        """Guesses that were computed, and how many of them were right and spared a step."""
        self.accepted = 0
        self.seconds = 0.0
        """Spent on drafting."""
        self.sizes = Histogram(_SIZES)
        """Guesses computed for a branch in a step that it was due a token in, 0 included: what the controller chose."""
        self.lengths = Histogram(_SIZES)
        """Right ones among the guesses of a branch in a step, where there were any guesses."""

    def idle(self, due: int) -> None:
        """Counts a step in which none of ``due`` branches was to have guesses."""
        self.sizes.observe(0, due)

    def count(self, due: int, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Counts a step in which ``due`` branches might have had guesses, and ``seconds`` of drafting."""
        self.seconds += seconds
        self.sizes.observe(0, due - len(outcomes))
        for outcome in outcomes:
            guesses, right = len(outcome.draft), len(outcome.accepted)
            self.drafted += guesses
            self.accepted += right
            self.sizes.observe(guesses)
            self.lengths.observe(right)
