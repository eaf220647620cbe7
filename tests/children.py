"""Child processes of a test run: kept from test to test, since each takes a second to import what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reasoner import children


@pytest.fixture(scope="session")
def warm_children() -> Iterator[None]:
    """Keep children until the last test has ended."""
    with children.keep_children():
        yield


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without children, in a process that keeps none."""
    monkeypatch.setattr(children, "_keepers", 0)
    for pool in children._pools:
        pool.close()
