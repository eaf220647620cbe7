"""Histograms of waiting times and token intervals."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from engine.protocol.types import FinishReason
from engine.scheduler.sequence import GenerateSequence, Sequence

WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the buckets of waiting times, in seconds."""
PACES = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the buckets of the time per token, in seconds."""


class Histogram:
    """Counts of values by bucket. One thread writes; others may read approximate values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Return, for each bound and for infinity, the number of values up to it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(list(self._counts)), strict=True))


class Timings:
    """Timings of one model's sequences. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self.queue = Histogram(WAITS)
        """Seconds from a request's arrival until one of its sequences first runs."""
        self.first_token = Histogram(WAITS)
        """Seconds from arrival until a branch has its first token."""
        self.per_token = Histogram(PACES)
        """Mean seconds between a branch's tokens after the first, counted when it ends."""
        self.finished: Counter[FinishReason] = Counter()
        """Number of finished branches by finish reason."""
        self.requests: Counter[str] = Counter()
        """Number of requests by kind: ``generate`` or ``score``."""

    def record_start(self, sequence: Sequence, now: float) -> None:
        """Record that a sequence runs for the first time."""
        sequence.started_at = now
        self.queue.observe(now - sequence.request.arrived_at)

    def record_token(self, sequence: GenerateSequence, now: float) -> None:
        """Record that a branch has its first new token."""
        sequence.first_token_at = now
        self.first_token.observe(now - sequence.request.arrived_at)

    def record_finish(self, sequence: GenerateSequence, reason: FinishReason, now: float) -> None:
        """Record a finished branch."""
        self.finished[reason] += 1
        gaps = len(sequence.generated) - len(sequence.branch.generated) - 1
        if sequence.first_token_at is not None and gaps > 0:
            self.per_token.observe((now - sequence.first_token_at) / gaps)
