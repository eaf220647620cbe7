"""A task of the Model Context Protocol outlives every process that has to do with it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR

from tests.api.mcp.clients import Task, connect, create_task, get_task
from tests.chaos.conftest import JOB, Service, same
from tests.chaos.fleet import PATIENCE, Fleet, Role, alone
from tests.chaos.processes import until

pytestmark = pytest.mark.timeout(240)


def test_a_task_is_polled_to_its_end_after_its_api_and_its_worker_were_killed(
    service: Service, undisturbed: dict[str, Any]
) -> None:
    address = f"http://127.0.0.1:{service.settings.port}"

    async def begin() -> str:
        async with connect(address, tasks=True) as client:
            return (await create_task(client, **JOB)).task_id

    async def poll(task_id: str) -> Any:
        async with connect(address, tasks=True) as client, asyncio.timeout(90):
            while (task := await get_task(client.session, task_id)).status == "working":
                assert task.poll_interval_ms is not None
                await asyncio.sleep(task.poll_interval_ms / 1000)
            assert task.result is not None
            return task.result.structured_content

    api = service.start_api()
    service.start_workers(1)
    task_id = asyncio.run(begin())
    worker = service.workers[service.search_is_running(task_id)]
    for process in (api, worker):
        process.kill()
        process.wait()
    service.start_workers(1)
    service.start_api()
    output = asyncio.run(poll(task_id))
    assert output["status"] == "completed"
    assert output["answer"] == undisturbed["answer"]
    job = service.ended(task_id)
    assert same(job["result"], undisturbed)
    assert job["attempt"] == 2
    assert output["usage"]["generated"] == job["usage"]["generated"]


@pytest.mark.parametrize("role", ["broker", "engine"])
def test_a_task_goes_on_after_its_broker_or_its_engine_was_killed(tmp_path: Path, role: Role) -> None:
    """A poll meanwhile is answered: with what the task waits for, or with an error that passes."""
    search = {"strategy": {"name": "beam", "n": 4}, "budget": {"tokens": 100_000}, "seed": 1}
    with Fleet(tmp_path, workers=1, apis=1, token_seconds=0.03, concurrency=2) as fleet:
        address = f"http://127.0.0.1:{fleet.ports[0]}"
        until(lambda: is_answering(address), "the API answers")

        async def follow() -> tuple[Any, Task]:
            """Return what a poll finds while the process is away, and the task at its end."""
            async with connect(address, tasks=True) as client:
                task_id = (await create_task(client, **search)).task_id
                await asyncio.to_thread(until, lambda: fleet.seq(task_id) >= 4, "the search has begun")
                await asyncio.to_thread(fleet.kill, role)
                found = await poll(client.session, task_id, until_away=True)
                fleet.restart(role)  # here: a child dies with the thread that started it
                ended = await poll(client.session, task_id, until_away=False)
                assert isinstance(ended, Task)
                return found, ended

        meanwhile, task = asyncio.run(follow())
        if role == "broker":
            assert isinstance(meanwhile, MCPError)
            assert meanwhile.error.code == INTERNAL_ERROR
            assert "broker" in meanwhile.error.message
        else:
            assert meanwhile.status == "working"
        assert (task.status, task.result is not None) == ("completed", True)
        job = httpx.get(f"{address}/v1/jobs/{task.task_id}", timeout=30).json()
        undisturbed = asyncio.run(alone(fleet.settings.engine_url[0], job))
    assert task.result is not None
    output = task.result.structured_content
    assert output is not None
    assert (output["status"], output["answer"]) == ("completed", undisturbed.result.answer)
    assert job["attempt"] == 1
    assert job["usage"]["generated"] == undisturbed.usage.generated


async def poll(session: ClientSession, task_id: str, *, until_away: bool) -> Task | MCPError:
    """Poll until the broker or the engine is found to be away, or until the task has ended."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found: Task | MCPError
            try:
                found = await get_task(session, task_id)
            except MCPError as error:
                found = error
            is_away = isinstance(found, MCPError) or "waiting: engine" in str(found.status_message)
            is_over = isinstance(found, Task) and found.status != "working"
            if is_away if until_away else is_over:
                return found
            await asyncio.sleep(0.1)


def is_answering(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/readyz", timeout=10).is_success
    return False
