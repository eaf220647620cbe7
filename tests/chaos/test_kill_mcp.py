"""A task of the Model Context Protocol outlives every process that has to do with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.mcp.clients import connect, create_task, get_task
from tests.chaos.conftest import JOB, Service, same

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
