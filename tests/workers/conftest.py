"""Runs the tests of the store on every available server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.fixtures import store, url
from workers.broker.embedded import EmbeddedBroker, find_server

__all__ = ["store", "url"]

_ON_PATH = [found for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]


@pytest.fixture(scope="session", params=_ON_PATH or [find_server()], ids=lambda program: Path(program).name)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), request.param) as running:
        yield running
