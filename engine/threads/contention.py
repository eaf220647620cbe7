"""One thread instead of all while others want the cores as well.

Threads that share out a kernel wait for the slowest, hundreds of times in a step. When another process has a core for a
while, all wait for the one that lost it, and two threads are slower than one that goes where there is room: 2 to 5
times with the bundled models (``python -m benchmarks.shared_cores``). The kernel counts how long each thread was ready
to run and did not: that tells, whoever the others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

WINDOW_SECONDS = 0.1
"""Work between two looks."""
MOST_WAITING = 0.25
"""Part of the time that the threads, taken together, may wait for a core before they count as disturbed."""
IN_A_ROW = 2
"""Such looks after each other: what comes and goes, like the service's own other processes, is no reason."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 16.0
"""Seconds on one thread before all are tried again, doubled with each trial that was disturbed, and at most."""


class ThreadGovernor:
    """Says how many threads to compute with. Its methods are called by the thread that computes."""

    def __init__(
        self,
        full: int,
        use: Callable[[int], None],
        waited: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``use`` takes a number of threads, ``waited`` answers the seconds that all of them waited for a core."""
        self._full = full
        self._use = use
        self._waited = waited
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._disturbed = 0
        """Looks in a row at which they waited too long."""
        self._alone_until: float | None = None
        self.begin()

    def begin(self) -> None:
        """Work begins after a rest, which is not looked at."""
        self._since, self._before = self._clock(), self._waited()

    def step(self) -> None:
        """A step was computed."""
        now = self._clock()
        if self._alone_until is not None:
            if now >= self._alone_until:
                self._alone_until = None
                self._use(self._full)
                self.begin()
            return
        if now - self._since < WINDOW_SECONDS:
            return
        if self._waited() - self._before <= MOST_WAITING * (now - self._since):
            self._disturbed, self._pause = 0, FIRST_PAUSE
        else:
            self._disturbed += 1
        self.begin()
        if self._disturbed == IN_A_ROW:
            self._disturbed = 0
            self._use(1)
            self._alone_until = now + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)


def waiting_clock(threads: Sequence[int], proc: Path = Path("/proc/self/task")) -> Callable[[], float] | None:
    """Return what answers the seconds that these threads of this process were ready and did not run, all together;
    ``None`` where the kernel does not count them."""
    files = [proc / str(thread) / "schedstat" for thread in threads]

    def waited() -> float:
        return sum(int(file.read_text().split()[1]) for file in files) / 1e9

    try:
        waited()
    except (OSError, IndexError, ValueError):
        return None
    return waited
