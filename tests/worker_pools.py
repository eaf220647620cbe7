"""Fixtures that keep worker processes between tests, since each takes a second for its imports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reasoner import subprocess_pool


@pytest.fixture(scope="session")
def warm_workers() -> Iterator[None]:
    """Keep idle workers until the last test has ended."""
    with subprocess_pool.keep_workers_alive():
        yield


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without workers, and keep none."""
    monkeypatch.setattr(subprocess_pool, "_num_keepers", 0)
    for pool in subprocess_pool._pools:
        pool.close()
