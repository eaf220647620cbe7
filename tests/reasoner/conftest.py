"""Fixtures of the tests of ``reasoner``: all share the workers that compare answers and match patterns."""

from __future__ import annotations

import pytest

from tests.worker_pools import no_workers, warm_workers

__all__ = ["no_workers", "warm_workers"]


@pytest.fixture(autouse=True)
def _shared(warm_workers: None) -> None:
    """Keep the workers from the first test on."""
