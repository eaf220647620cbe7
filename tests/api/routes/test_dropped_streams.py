"""Streams that end early, on a real socket: other requests continue, and nothing is logged as an error."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import redis
import structlog
import uvicorn
from structlog.testing import capture_logs

from api.app.app import create_app
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry
from tests.api.conftest import submitted
from tests.chaos.fleet import until
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

LARGE = {"text": "x" * 4000}
COUNT = 300
"""Number of events of that size, more than all buffers between server and client hold."""


@pytest.fixture(autouse=True)
def _loud(_quiet: None) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))


@asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[tuple[uvicorn.Server, httpx.AsyncClient]]:
    address = str(settings.data_dir / "api.sock")
    app = create_app(settings, ScriptedEngine())
    server = uvicorn.Server(
        uvicorn.Config(app, uds=address, log_config=None, access_log=False, timeout_graceful_shutdown=0)
    )
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, "the server listens")
    transport = httpx.AsyncHTTPTransport(uds=address)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
        try:
            yield server, client
        finally:
            server.should_exit = True
            await serving


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of exceptions that the server's and the event loop's loggers reported."""
    gc.collect()
    return [record.getMessage() for record in caplog.records if record.exc_info]


async def with_events(store: JobStore, count: int) -> str:
    job, _ = await store.submit(
        {"problem": "?", "strategy": {"name": "greedy"}, "priority": "batch"}, owner="local", queue_cap=10
    )
    held = await store.claim(job["id"], lease=60, max_attempts=3, worker="w")
    assert held is not None
    await store.commit(held, [Entry(f"k{index}", "node", LARGE, Usage(), 0.0) for index in range(count)])
    return str(job["id"])


@pytest.mark.parametrize("read", [1, 100_000])
async def test_a_client_that_disconnects_in_mid_stream_causes_no_error(
    settings: Settings, store: JobStore, caplog: pytest.LogCaptureFixture, read: int
) -> None:
    job_id = await with_events(store, COUNT)
    with capture_logs() as lines:
        async with listening(settings) as (server, client):
            async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                got = 0
                async for part in answer.aiter_bytes(4096):
                    got += len(part)
                    if got >= read:
                        break
            await until(lambda: not server.server_state.tasks, "no request is being answered")
    assert [(line["event"], line["log_level"]) for line in lines if line.get("path")] == [("request", "info")]
    assert tracebacks(caplog) == []


async def test_a_stopping_server_ends_its_streams_cleanly(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as lines:
        async with listening(settings) as (server, client):
            job_id = await submitted(client)
            async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                parts = answer.aiter_lines()
                first = await anext(parts)
                server.should_exit = True
                rest = [line async for line in parts]
    assert (first, rest[0]) == ("id: 1", "event: job.queued")
    assert [line["event"] for line in lines if line["log_level"] == "error"] == []
    assert tracebacks(caplog) == []


async def test_a_closed_stream_ignores_a_lost_broker(
    store: JobStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await with_events(store, 1)
    follower = asyncio.create_task(anext(store.follow(job_id, 3)))
    with redis.Redis.from_url(url) as client:
        await until(lambda: "xread" in str(client.execute_command("CLIENT LIST")), "it waits for the next event")
        follower.cancel()
        await asyncio.wait({follower})
        client.client_kill_filter(_type="normal", skipme=True)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "what it left behind has ended")
    assert tracebacks(caplog) == []
