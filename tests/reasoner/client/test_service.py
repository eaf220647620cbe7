"""Both clients against the application in this process: jobs, events, trees, batches, keys and errors."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.from_thread
import anyio.to_thread
import httpx
import pytest

from api.app.app import create_app
from reasoner.client import AsyncClient, Client, ServiceError
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings

SPEC = {"problem": "1 + 1?", "strategy": {"name": "best_of_n", "n": 2}, "seed": 1, "metadata": {"a b": "x&y=z"}}


class _Bridge(httpx.BaseTransport):
    """Transport of a blocking client in a worker thread that forwards its requests to the application."""

    def __init__(self, transport: httpx.ASGITransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return anyio.from_thread.run(self._handle, request)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        body = httpx.ByteStream(request.read())
        forwarded = httpx.Request(request.method, request.url, headers=request.headers, stream=body)
        response = await self._transport.handle_async_request(forwarded)
        content = await response.aread()
        return httpx.Response(response.status_code, headers=response.headers, content=content)


class Blocking:
    """``Client`` with awaitable methods."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                result = getattr(self._client, name)(*args, **kwargs)
                return list(result) if inspect.isgenerator(result) else result

            return await anyio.to_thread.run_sync(run)

        return call


class NonBlocking:
    """``AsyncClient`` whose iterators are awaited as lists."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self._client, name)(*args, **kwargs)
            return [item async for item in result] if inspect.isasyncgen(result) else await result

        return call


@pytest.fixture(params=["blocking", "asyncio"])
async def service(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[Any]:
    app = create_app(settings, ScriptedEngine())
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app):
        if request.param == "blocking":
            with Client("http://127.0.0.1", transport=_Bridge(transport)) as client:
                yield Blocking(client)
        else:
            async with AsyncClient("http://127.0.0.1", transport=transport) as async_client:
                yield NonBlocking(async_client)


async def test_a_job_is_submitted_streamed_and_read(service: Any, work: Callable[[str], Awaitable[None]]) -> None:
    job = await service.submit(SPEC)
    assert job.status == "queued"
    await work(job.id)
    events = await service.events(job.id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert await service.events(job.id, after=2) == events[2:]
    ended = await service.wait(job.id)
    assert ended.status == "completed"
    assert ended.result is not None
    tree = await service.tree(job.id)
    assert tree["best"] == ended.result.node
    assert [item["id"] for item in (await service.list())["data"]] == [job.id]
    found = [await service.list(metadata={"a b": team}, q="1", created_after=1) for team in ("x&y=z", "z")]
    assert [[item["id"] for item in page["data"]] for page in found] == [[job.id], []]
    assert len(await service.export()) == 1
    await service.delete(job.id)
    with pytest.raises(ServiceError, match=job.id) as refused:
        await service.get(job.id)
    assert refused.value.status == 404


async def test_a_queued_job_is_cancelled(service: Any) -> None:
    job = await service.submit(SPEC)
    assert (await service.cancel(job.id)).status == "cancelled"
    with pytest.raises(ServiceError, match="submit a new job"):
        await service.retry(job.id)


async def test_files_are_uploaded_listed_read_and_deleted(service: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    request = {"custom_id": "1", "method": "POST", "url": "/v1/jobs", "body": {"problem": "1 + 1?"}}
    path.write_text(json.dumps(request) * 1000)
    made = await service.upload_file(path)
    assert (made["filename"], made["bytes"], made["purpose"]) == ("lines.jsonl", path.stat().st_size, "batch")
    assert [file["id"] for file in (await service.list_files(purpose="batch"))["data"]] == [made["id"]]
    await service.download_file(made["id"], tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    await service.delete_file(made["id"])
    with pytest.raises(ServiceError, match="there is no file"):
        await service.download_file(made["id"], tmp_path / "copy")
    with pytest.raises(ServiceError, match="cannot be read"):
        await service.upload_file(tmp_path / "missing")


async def test_a_batch_is_submitted_and_cancelled(service: Any) -> None:
    batch = await service.submit_batch({"jobs": [{"problem": "1 + 1?"}] * 2, "budget": {"tokens": 500}})
    assert [job.status for job in (await service.batch(batch.id)).jobs] == ["queued", "queued"]
    assert [item["id"] for item in (await service.list_batches())["data"]] == [batch.id]
    assert (await service.cancel_batch(batch.id)).status == "cancelled"


async def test_keys_are_created_listed_and_revoked(service: Any, settings: Settings) -> None:
    key = await service.create_key({"name": "notebook", "scopes": ["admin"]})
    assert key["key"].startswith("rk_")
    with pytest.raises(ServiceError, match="Authorization: Bearer KEY") as refused:
        await service.list_keys()
    assert refused.value.status == 401


async def test_an_error_names_the_fault_and_the_field(service: Any) -> None:
    with pytest.raises(ServiceError, match=r"budget\.token: ") as refused:
        await service.submit({"problem": "?", "budget": {"token": 5}})
    assert refused.value.status == 422
    assert not refused.value.is_transient
    assert await service.default_strategy() == "best_of_n"
