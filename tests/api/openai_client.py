"""OpenAI's own client, the application on a real port, and a worker, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI
from redis.asyncio import Redis

from api.app.app import create_app
from api.roles.serve import Server
from engine.protocol.types import EngineClient
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

MODEL = "policy"
QUESTION = [{"role": "user", "content": "1 + 1?"}]

Run = Callable[..., Awaitable[object]]


@contextlib.asynccontextmanager
async def listening(settings: Settings, engine: EngineClient | None = None) -> AsyncIterator[str]:
    """Yield the address of the running application."""
    async with serving(settings, engine) as (address, _):
        yield address


@contextlib.asynccontextmanager
async def serving(settings: Settings, engine: EngineClient | None = None) -> AsyncIterator[tuple[str, Server]]:
    """Yield the address and the server of the running application."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        app = create_app(settings, engine or ScriptedEngine())
        server = Server(uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=30), app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def working(
    url: str, store: JobStore, run: Run = run_job, engine: EngineClient | None = None
) -> AsyncIterator[None]:
    """Run a worker that executes the jobs in the queues one after the other."""

    async def work() -> None:
        async with Redis.from_url(url, socket_timeout=None) as queues:
            while True:
                _, message = await queues.blpop(["interactive", "batch"])
                (job_id, *_), *_ = json.loads(json.loads(message)["body"])
                await execute(
                    job_id,
                    store=store,
                    engine=engine or ScriptedEngine(),
                    run=run,
                    shutting_down=asyncio.Event(),
                    leases=Leases(store, 30),
                    claims=ClaimQueue(store, lease=30, max_attempts=3),
                )

    worker = asyncio.create_task(work())
    try:
        yield
    finally:
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


@contextlib.asynccontextmanager
async def talking(settings: Settings, url: str, store: JobStore, engine: EngineClient) -> AsyncIterator[AsyncOpenAI]:
    """Yield OpenAI's client of a service whose worker and application have this engine."""
    async with (
        listening(settings, engine) as address,
        working(url, store, engine=engine),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def address(settings: Settings) -> AsyncIterator[str]:
    async with listening(settings) as address:
        yield address


@pytest.fixture
async def ai(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
async def worker(url: str, store: JobStore) -> AsyncIterator[None]:
    async with working(url, store):
        yield


def job_of(answer_id: str) -> str:
    """Return the id of the job behind an answer."""
    return "job_" + answer_id.rpartition("_")[2].rpartition("-")[2]
