"""Shutdown of a server while calls wait: each response states how to continue, and no job is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from api.http.metrics import HTTP_STREAMS
from reasoner.jobs.job import JobError
from tests.api.openai_client import MODEL, QUESTION, serving, working
from workers.config.settings import Settings
from workers.store.jobs import JobStore

CHAT = {"model": MODEL, "messages": QUESTION, "seed": 5}
RESPONSE = {"model": MODEL, "input": "1 + 1?", "seed": 5}
JOB = {"problem": "1 + 1?", "seed": 5}
KEY = {"Idempotency-Key": "the same"}


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            pass


async def the_job(store: JobStore) -> dict[str, Any]:
    """Return the only job, once a client has submitted it."""
    jobs: list[Any] = []

    async def look() -> bool:
        jobs[:] = (await store.list_jobs(owner=None, after=None, limit=2)).jobs
        return bool(jobs)

    await until(look)
    [job] = jobs
    return dict(job)


def opens() -> Callable[[], Awaitable[bool]]:
    """Return a condition that is true once one more stream is open than now."""
    before = HTTP_STREAMS._value.get()

    async def look() -> bool:
        await asyncio.sleep(0)
        return bool(HTTP_STREAMS._value.get() > before)

    return look


async def blocked(store: JobStore) -> set[str]:
    """Return the ids of connections to the broker that wait for an event."""
    return {client["id"] for client in await store.command("CLIENT LIST") if "b" in client["flags"]}


def blocks(store: JobStore, before: set[str]) -> Callable[[], Awaitable[object]]:
    """Return a condition that is true once there is a blocked connection that is not in ``before``."""

    async def look() -> object:
        return await blocked(store) - before

    return look


async def asked(settings: Settings, store: JobStore, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    """Return the response to a call that waits when its server is shut down."""
    async with serving(settings) as (address, server), httpx.AsyncClient(base_url=address, timeout=60) as client:
        streaming = opens()
        asking = asyncio.create_task(client.post(path, json=body, headers=headers))
        await the_job(store)
        if body.get("stream"):
            await until(streaming)
        server.should_exit = True
        return await asking


def lines(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


async def test_a_submission_that_waits_is_answered_202(settings: Settings, store: JobStore) -> None:
    answer = await asked(settings, store, "/v1/jobs", JOB, {"Prefer": "wait=60"})
    job = await the_job(store)
    assert (answer.status_code, answer.json()["id"], answer.json()["status"]) == (202, job["id"], "queued")
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["status"] == "queued"


@pytest.mark.parametrize("events", [False, True])
async def test_a_waiting_read_returns_the_present_state_of_the_job(
    settings: Settings, store: JobStore, events: bool
) -> None:
    async with serving(settings) as (address, server), httpx.AsyncClient(base_url=address, timeout=60) as client:
        job_id = (await client.post("/v1/jobs", json=JOB)).json()["id"]
        streaming = opens()
        if events:
            asking = asyncio.create_task(client.get(f"/v1/jobs/{job_id}/events"))
            await until(streaming)
        else:
            waiting = blocks(store, await blocked(store))
            asking = asyncio.create_task(client.get(f"/v1/jobs/{job_id}", params={"wait": 60}))
            await until(waiting)
        server.should_exit = True
        answer = await asking
    assert answer.status_code == 200
    if events:
        assert [event["type"] for event in lines(answer)] == ["job.queued"]
    else:
        assert answer.json()["status"] == "queued"
    assert (await store.get(job_id))["status"] == "queued"


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)])
async def test_a_retry_with_the_same_key_continues_the_same_job(
    settings: Settings, store: JobStore, url: str, path: str, body: dict[str, Any]
) -> None:
    answer = await asked(settings, store, path, body, KEY)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    job = await the_job(store)
    assert job["status"] == "queued"
    async with (
        serving(settings) as (address, _),
        working(url, store),
        httpx.AsyncClient(base_url=address, timeout=60) as client,
    ):
        again = await client.post(path, json=body, headers=KEY)
    assert again.status_code == 200
    assert again.json()["id"].endswith(job["id"].removeprefix("job_"))
    assert (await the_job(store))["status"] == "completed"


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_an_idempotency_key_the_job_is_cancelled(
    settings: Settings, store: JobStore, path: str, body: dict[str, Any], stream: bool
) -> None:
    await asked(settings, store, path, body | {"stream": stream}, {})
    assert (await the_job(store))["status"] == "cancelled"


async def test_a_stream_of_chunks_ends_with_an_error_that_openais_client_raises(
    settings: Settings, store: JobStore
) -> None:
    async with serving(settings) as (address, server):
        client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, extra_headers=KEY, extra_body={"seed": 5}
        )
        assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
        server.should_exit = True
        with pytest.raises(APIError, match="Idempotency-Key") as caught:
            async for _ in stream:
                pass
        await client.close()
    assert not isinstance(caught.value, APIStatusError)
    assert caught.value.code == "shutting_down"
    assert (await the_job(store))["status"] == "queued"


async def test_a_stream_of_a_response_continues_on_another_server_after_its_last_event(
    settings: Settings, store: JobStore, url: str
) -> None:
    answer = await asked(settings, store, "/v1/responses", RESPONSE | {"stream": True}, KEY)
    *before, error = lines(answer)
    assert (error["type"], error["code"], error["param"]) == ("error", "shutting_down", None)
    assert [event["type"] for event in before] == ["response.created", "response.queued"]
    number = error["sequence_number"]
    assert number == before[-1]["sequence_number"]
    response = before[0]["response"]["id"]
    async with (
        serving(settings) as (address, _),
        working(url, store),
        httpx.AsyncClient(base_url=address, timeout=60) as client,
    ):
        asked_for = {"stream": True, "starting_after": number}
        after = lines(await client.get(f"/v1/responses/{response}", params=asked_for))
        whole = lines(await client.get(f"/v1/responses/{response}", params={"stream": True}))
    assert [*before, *after] == whole
    assert after[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("code", "status"),
    [("max_attempts", 503), ("engine_error", 502), ("internal_error", 500), ("invalid_request", 400)],
)
async def test_a_failed_chat_has_the_status_of_its_error_code(
    settings: Settings, store: JobStore, code: str, status: int
) -> None:
    async with serving(settings) as (address, _), httpx.AsyncClient(base_url=address, timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        job = await the_job(store)
        claim = await store.claim(job["id"], lease=30, max_attempts=3, worker="one")
        assert claim is not None
        await store.finish(claim, "failed", error=JobError(code=code, message="no luck"))
        answer = await asking
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (status, code, "no luck")
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert answer.headers["x-should-retry"] == "false"
