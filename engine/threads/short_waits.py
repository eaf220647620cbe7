"""Make OpenMP's threads spin for microseconds before they sleep. Import this module before torch.

OpenMP's threads wait for each other about a hundred times in a decoding step, and by default spin for milliseconds
before they sleep. Alone on the machine that costs nothing. On a shared core, or under a quota, a thread spins away the
time that the one it waits for needs, and every wait lasts until the scheduler takes the core away. The libraries read
the environment when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 3000
"""Rounds of about ten nanoseconds: longer than threads with equal shares of a kernel wait for each other, far shorter
than a scheduler's time slice. ``python -m benchmarks.shared_cores`` measures it."""


def shorten_waits(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of GNU's OpenMP, and of LLVM's and Intel's (in milliseconds), unless they are set already."""
    if "OMP_WAIT_POLICY" in environ:
        return
    environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    environ.setdefault("KMP_BLOCKTIME", "1")


shorten_waits()
