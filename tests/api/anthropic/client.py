"""Anthropic's own client, the application on a real port, and a worker, all in one event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from anthropic import AsyncAnthropic

from engine.protocol.types import EngineClient
from tests.api.openai_client import listening, working
from workers.config.settings import Settings
from workers.store.jobs import JobStore

MODEL = "policy"
QUESTION = [{"role": "user", "content": "1 + 1?"}]


@contextlib.asynccontextmanager
async def talking(
    settings: Settings, url: str, store: JobStore, engine: EngineClient | None = None
) -> AsyncIterator[AsyncAnthropic]:
    """Yield Anthropic's client of a service whose worker and application have this engine."""
    async with (
        listening(settings, engine) as address,
        working(url, store, engine=engine),
        AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def client(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client, with a worker behind the service."""
    async with talking(settings, url, store) as client:
        yield client


@pytest.fixture
async def http(client: AsyncAnthropic) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client of the same service."""
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=60) as http:
        yield http


def job_of(message_id: str) -> str:
    """Return the id of the job behind a message."""
    return "job_" + message_id.removeprefix("msg_")
