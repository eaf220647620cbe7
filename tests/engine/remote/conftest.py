"""A client of two scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engine.remote.fleet import Fleet


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("engine.remote.replicas.WATCH_INTERVAL_SECONDS", 0.01)
    fleet = Fleet()
    yield fleet
    await fleet.client.close()
