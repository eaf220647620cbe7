"""Importing this before torch makes the threads of its pool spin for microseconds, then sleep, where nobody said else.

OpenMP's threads wait for each other some hundred times in a decoding step, and by default spin for milliseconds before
they sleep. Alone on the machine that costs nothing. On a core that is shared, or under a quota, a thread spins away the
time that the one it waits for would need, and every wait lasts until the scheduler takes the core away. The libraries
read the environment when they are loaded, so it must be there before.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = 3000
"""Rounds of some ten nanoseconds: longer than threads with equal shares of a kernel wait for each other, far shorter
than a scheduler's time slice. ``python -m benchmarks.shared_cores`` measures it."""


def wait_shortly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what GNU's OpenMP reads, and LLVM's and Intel's (in milliseconds), unless there is a wish already."""
    if "OMP_WAIT_POLICY" in environ:
        return
    environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    environ.setdefault("KMP_BLOCKTIME", "1")


wait_shortly()
