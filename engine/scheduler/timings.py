"""How long requests wait and how fast their tokens come, counted as they happen. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from engine.protocol.types import FinishReason
from engine.scheduler.sequence import GenerateSequence, Sequence

WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the buckets of waiting times, in seconds."""
PACES = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
"""The same for the time of one token."""


class Histogram:
    """Counts of values by bucket. One thread writes; others may read and see about now."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value that came up so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """For each bound, and for infinity, how many values are at most that."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(list(self._counts)), strict=True))


class Timings:
    """What happened to one model's sequences. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self.queue = Histogram(WAITS)
        """From a request's arrival until one of its sequences first runs."""
        self.first_token = Histogram(WAITS)
        """From arrival until a branch has its first token."""
        self.per_token = Histogram(PACES)
        """Mean time between a branch's tokens after the first, counted when it ends."""
        self.finished: Counter[FinishReason] = Counter()
        """Branches by why they ended."""
        self.requests: Counter[str] = Counter()
        """Requests by what they ask for: ``generate`` or ``score``."""

    def record_start(self, sequence: Sequence, now: float) -> None:
        """A sequence runs, perhaps not for the first time."""
        if sequence.started_at is None:
            sequence.started_at = now
            self.queue.observe(now - sequence.job.arrived_at)

    def record_token(self, sequence: GenerateSequence, now: float) -> None:
        """A branch has a token, perhaps not its first."""
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self.first_token.observe(now - sequence.job.arrived_at)

    def record_finish(self, sequence: GenerateSequence, reason: FinishReason, now: float) -> None:
        """A branch is finished."""
        self.finished[reason] += 1
        gaps = len(sequence.generated) - len(sequence.branch.generated) - 1
        if sequence.first_token_at is not None and gaps > 0:
            self.per_token.observe((now - sequence.first_token_at) / gaps)
