"""A real broker for tests: one server for a test session, emptied before each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from workers.broker.embedded import EmbeddedBroker
from workers.store.jobs import JobStore


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def url(broker: EmbeddedBroker) -> str:
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    return broker.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[JobStore]:
    store = JobStore(url, retry_seconds=5.0)  # a worker's value, so that a busy machine does not look like an outage
    yield store
    await store.close()
