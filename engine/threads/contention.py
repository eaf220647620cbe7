"""Compute on one thread while other processes compete for the cores.

Threads that share a kernel's work wait for the slowest, hundreds of times in a step. While another process runs on one
of the cores, all threads wait for the one that lost it, and two threads are 2 to 5 times slower than one that the
scheduler can move (bundled models, ``python -m benchmarks.shared_cores``). Linux counts how long each thread was ready
to run but did not run, whatever the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

WINDOW_SECONDS = 0.1
"""Computing time between two measurements."""
MAX_WAITING_SHARE = 0.25
"""Share of the time that the threads, taken together, may wait for a core before they count as disturbed."""
MIN_DISTURBED_WINDOWS = 2
"""Consecutive disturbed measurements before the fallback: short bursts, as of the service's own processes, are none."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 16.0
"""Time on one thread before all are tried again, doubled after each disturbed trial, and its maximum."""


class ThreadGovernor:
    """Sets the number of computing threads. Its methods are called by the thread that computes."""

    def __init__(
        self,
        max_threads: int,
        set_num_threads: Callable[[int], None],
        read_waiting_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read_waiting_seconds`` returns the time that all threads have waited for a core since they started."""
        self._max_threads = max_threads
        self._set_num_threads = set_num_threads
        self._read_waiting_seconds = read_waiting_seconds
        self._clock = clock
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._num_disturbed = 0
        """Consecutive measurements at which the threads waited too long."""
        self._single_thread_until: float | None = None
        self.begin()

    def begin(self) -> None:
        """Start a measurement after an idle period."""
        self._window_start, self._waited_before = self._clock(), self._read_waiting_seconds()

    def step(self) -> None:
        """Record that a step was computed, and change the number of threads if it is time to."""
        now = self._clock()
        if self._single_thread_until is not None:
            if now >= self._single_thread_until:
                self._single_thread_until = None
                self._set_num_threads(self._max_threads)
                self.begin()
            return
        if now - self._window_start < WINDOW_SECONDS:
            return
        if self._read_waiting_seconds() - self._waited_before <= MAX_WAITING_SHARE * (now - self._window_start):
            self._num_disturbed, self._pause_seconds = 0, FIRST_PAUSE_SECONDS
        else:
            self._num_disturbed += 1
        self.begin()
        if self._num_disturbed == MIN_DISTURBED_WINDOWS:
            self._num_disturbed = 0
            self._set_num_threads(1)
            self._single_thread_until = now + self._pause_seconds
            self._pause_seconds = min(MAX_PAUSE_SECONDS, 2 * self._pause_seconds)


def waiting_clock(threads: Sequence[int], proc: Path = Path("/proc/self/task")) -> Callable[[], float] | None:
    """Return a function that reads the total seconds that these threads of this process were ready but did not run.

    Return ``None`` where the kernel does not count them.
    """
    files = [proc / str(thread) / "schedstat" for thread in threads]

    def read_waiting_seconds() -> float:
        return sum(int(file.read_text().split()[1]) for file in files) / 1e9

    try:
        read_waiting_seconds()
    except (OSError, IndexError, ValueError):
        return None
    return read_waiting_seconds
