"""Child processes of a test run: kept from test to test, since each takes a second to import what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reasoner import subprocess_pool


@pytest.fixture(scope="session")
def warm_children() -> Iterator[None]:
    """Keep children until the last test has ended."""
    with subprocess_pool.keep_workers_alive():
        yield


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without children, in a process that keeps none."""
    monkeypatch.setattr(subprocess_pool, "_keepers", 0)
    for pool in subprocess_pool._pools:
        pool.close()
