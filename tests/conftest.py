"""What all tests need."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A run that was started in the background inherits an ignored Ctrl-C, and every process that it starts would ignore it
# too. Processes inherit what is ignored, but never a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of tests are so small that a second thread has nothing to win, and where other work shares the processors,
# each of thousands of operators waits for it. Before torch is imported, and for every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_LONGEST = {"test_triton.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark fuzzing as long, and put the longest first: nothing else is left for the other core when one begins last."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)
    for item in items:
        if Path(__file__).parent / "fuzz" in item.path.parents:
            item.add_marker("long")
