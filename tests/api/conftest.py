"""The application in this process, on a real broker, with an engine that has no model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from api.app.app import create_app
from engine.protocol.types import EngineClient
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.workers.fixtures import broker, store, url
from workers.config.settings import Settings, load_settings
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

__all__ = ["broker", "store", "url"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(autouse=True)
def _same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give jobs without a seed the same ones in every run: an engine without a model finds no answer for some."""
    monkeypatch.setattr("reasoner.admission.sources.secrets.randbelow", random.Random(shift(0)).randrange)


@contextlib.asynccontextmanager
async def serving(settings: Settings, engine: EngineClient | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(settings, engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield client


@pytest.fixture
def settings(url: str, tmp_path: Path) -> Settings:
    return load_settings(redis_url=url, data_dir=tmp_path, body_cap=20_000, queue_cap=5)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, ScriptedEngine()) as client:
        yield client


@pytest.fixture
def work(store: JobStore) -> Callable[[str], Awaitable[None]]:
    """Return a function that runs one job as a worker does when its message arrives."""

    async def run(job_id: str) -> None:
        await execute(
            job_id,
            store=store,
            engine=ScriptedEngine(),
            run=run_job,
            shutting_down=asyncio.Event(),
            leases=Leases(store, 30),
            claims=ClaimQueue(store, lease=30, max_attempts=3),
        )

    return run


async def submitted(client: httpx.AsyncClient, **spec: Any) -> str:
    """Submit a job and return its id."""
    response = await client.post("/v1/jobs", json={"problem": "1 + 1?", **spec})
    assert response.status_code == 202, response.text
    return str(response.json()["id"])
