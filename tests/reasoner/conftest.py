"""Fixtures of the tests of ``reasoner``; the workers for comparisons and patterns are shared."""

from __future__ import annotations

import pytest

from tests.worker_pools import no_workers, warm_workers

__all__ = ["no_workers", "warm_workers"]


@pytest.fixture(autouse=True)
def _shared(warm_workers: None) -> None:
    """Keep the worker pools running for the whole session."""
