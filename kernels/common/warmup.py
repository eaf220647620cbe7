"""A count of computations that ran for the first time, and so were recorded (as a kernel graph or a CUDA graph) too.

Whoever measures the time of a step discards it if the count has risen meanwhile.
"""

from __future__ import annotations

num_first_runs = 0
"""Number of first runs in this process."""


def count_first_run() -> None:
    """Count one more first run."""
    global num_first_runs
    num_first_runs += 1
