"""A client that leaves an OpenAI route: its job is cancelled, whatever happens at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.exceptions import TimeoutError as BrokerTimeout

from tests.api.openai_client import MODEL, QUESTION, address, ai, http, serving
from workers.config.settings import Settings
from workers.store.jobs import JobStore
from workers.store.serialization import JobDocument

__all__ = ["address", "ai", "http"]

Ask = Callable[[AsyncOpenAI, bool], Any]


async def _complete(ai: AsyncOpenAI, stream: bool) -> None:
    answer: Any = await ai.chat.completions.create(model=MODEL, messages=QUESTION, stream=stream)  # type: ignore[call-overload]
    async for _ in answer:
        pass


async def _respond(ai: AsyncOpenAI, stream: bool) -> None:
    answer: Any = await ai.responses.create(model=MODEL, input="1 + 1?", stream=stream)
    async for _ in answer:
        pass


every_route = pytest.mark.parametrize("ask", [_complete, _respond])
both_forms = pytest.mark.parametrize("stream", [False, True])


async def _leave(asking: asyncio.Task[None]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def _wait_for_job(http: httpx.AsyncClient) -> str:
    jobs: list[dict[str, Any]] = []
    while not jobs:
        jobs = (await http.get("/v1/jobs")).json()["data"]
    return str(jobs[0]["id"])


async def _wait_for_status(http: httpx.AsyncClient, job_id: str) -> str:
    return str((await http.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()["status"])


class SlowBroker:
    """Makes the first cancellations fail, as those at a broker that does not answer in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
        self.num_failures = num_failures
        self.was_tried = asyncio.Event()
        self._cancel = JobStore.cancel
        monkeypatch.setattr(JobStore, "cancel", lambda store, job_id: self._try(store, job_id))
        monkeypatch.setattr("workers.store.event_log._RECONNECT_SECONDS", 0.0)

    async def _try(self, store: JobStore, job_id: str) -> JobDocument:
        self.was_tried.set()
        if self.num_failures == 0:
            return await self._cancel(store, job_id)
        self.num_failures -= 1
        raise BrokerTimeout


@every_route
@both_forms
async def test_a_broker_that_is_slow_when_a_client_leaves_gets_the_cancellation_later(
    ai: AsyncOpenAI, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, ask: Ask, stream: bool
) -> None:
    slow = SlowBroker(monkeypatch, num_failures=3)
    asking = asyncio.create_task(ask(ai, stream))
    job_id = await _wait_for_job(http)
    await _leave(asking)
    assert await _wait_for_status(http, job_id) == "cancelled"
    assert slow.num_failures == 0


@every_route
@both_forms
async def test_a_client_that_leaves_before_its_job_is_stored_has_it_cancelled(
    ai: AsyncOpenAI, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, ask: Ask, stream: bool
) -> None:
    arrived, has_left = asyncio.Event(), asyncio.Event()
    submit = JobStore.submit

    async def submit_late(store: JobStore, *arguments: Any, **options: Any) -> tuple[JobDocument, bool]:
        arrived.set()
        await has_left.wait()
        return await submit(store, *arguments, **options)

    monkeypatch.setattr(JobStore, "submit", submit_late)
    asking = asyncio.create_task(ask(ai, stream))
    await arrived.wait()
    await _leave(asking)
    has_left.set()
    assert await _wait_for_status(http, await _wait_for_job(http)) == "cancelled"


@both_forms
async def test_a_service_that_stops_does_not_wait_for_a_broker_to_take_a_cancellation(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slow = SlowBroker(monkeypatch, num_failures=10**9)
    async with (
        serving(settings) as (address, server),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as ai,
        httpx.AsyncClient(base_url=address, timeout=60) as http,
    ):
        asking = asyncio.create_task(_complete(ai, stream))
        await _wait_for_job(http)
        await _leave(asking)
        await slow.was_tried.wait()
        await http.aclose()
    assert not server.server_state.tasks
