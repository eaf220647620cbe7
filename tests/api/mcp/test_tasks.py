"""The extension for tasks: a job is a task of any process of the service, for its owner alone."""

from __future__ import annotations

import asyncio
import itertools
from datetime import datetime
from typing import Any, Literal

import httpx
import pytest
from mcp.client.client import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_REQUIRED_CLIENT_CAPABILITY, CallToolResult, Result

from api.mcp.tasks import EXTENSION
from tests.api.keyed import header
from tests.api.mcp.clients import TASKS, Task, connect, create_task, get_task, send_task_request
from tests.api.openai_client import address, http, listening, worker, working
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["address", "http", "worker"]

METHODS = ("tasks/get", "tasks/update", "tasks/cancel")


async def wait_for_end(client: Client, task_id: str) -> Task:
    """Poll a task until it has ended, as often as it suggests."""
    async with asyncio.timeout(200):
        while True:
            task = await get_task(client.session, task_id)
            if task.status != "working":
                return task
            assert task.poll_interval_ms is not None
            await asyncio.sleep(task.poll_interval_ms / 10_000)  # a tenth, since the engine has no model


def read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def test_the_extension_is_declared_in_discovery(address: str) -> None:
    assert EXTENSION == TASKS
    async with connect(address) as client:
        assert client.server_capabilities.extensions == {TASKS: {}}


async def test_a_solve_is_a_task_for_a_client_that_declares_them(
    address: str, http: httpx.AsyncClient, worker: None, settings: Settings
) -> None:
    async with connect(address, tasks=True) as client:
        task = await create_task(client, budget={"tokens": 2000}, seed=1)
        assert (task.result_type, task.status, task.ttl_ms) == ("task", "working", None)
        ended = await wait_for_end(client, task.task_id)
    assert (ended.result_type, ended.status) == ("complete", "completed")
    job = (await http.get(f"/v1/jobs/{task.task_id}")).json()
    assert ended.result is not None
    output: Any = ended.result.structured_content
    assert output["answer"] == job["result"]["answer"]
    assert not ended.result.is_error
    assert read_time(ended.created_at) == pytest.approx(job["created_at"], abs=1e-3)
    assert read_time(ended.last_updated_at) == pytest.approx(job["finished_at"], abs=1e-3)
    kept_seconds = job["finished_at"] - job["created_at"] + settings.retention_seconds
    assert ended.ttl_ms == pytest.approx(kept_seconds * 1000, abs=2)


async def test_a_ranking_is_a_task_too_and_look_and_cancel_are_none(address: str, worker: None) -> None:
    async with connect(address, tasks=True) as client:
        task = await create_task(client, "select", candidates=["\\boxed{1}", "\\boxed{2}", "\\boxed{2}"], by="majority")
        ended = await wait_for_end(client, task.task_id)
        assert ended.result is not None
        output: Any = ended.result.structured_content
        assert [item["index"] for item in output["ranking"]] == [1, 2, 0]
        for tool in ("job", "cancel"):
            shown: Any = (await client.call_tool(tool, {"job_id": task.task_id})).structured_content
            assert shown["status"] == "completed"


async def test_a_call_of_a_client_that_resolves_tasks_returns_the_result(address: str, worker: None) -> None:
    class Resolving(ClientExtension):
        identifier = TASKS

        def claims(self) -> list[ResultClaim[Any]]:
            return [ResultClaim(result_type="task", model=ClaimedTask, resolve=self.resolve)]

        async def resolve(self, task: Any, context: ClaimContext) -> CallToolResult:
            while True:
                current = await get_task(context.session, task.task_id)
                if current.status == "completed":
                    assert current.result is not None
                    return current.result

    async with Client(f"{address}/mcp", extensions=[Resolving()]) as client:
        result = await client.call_tool("solve", {"problem": "1 + 1?", "seed": 1})
    output: Any = result.structured_content
    assert output["status"] == "completed"


async def test_a_cancelled_task_stays_cancelled(address: str) -> None:
    async with connect(address, tasks=True) as client:
        task = await create_task(client)
        for _ in range(2):
            acknowledged = await send_task_request(client.session, "tasks/cancel", task.task_id)
            assert acknowledged.model_dump(exclude={"meta"}, exclude_none=True) == {}
        assert (await get_task(client.session, task.task_id)).status == "cancelled"


async def test_an_update_is_acknowledged_and_changes_nothing(address: str) -> None:
    async with connect(address, tasks=True) as client:
        task = await create_task(client)
        responses = {"name": {"action": "accept", "content": {"input": "x"}}}
        await send_task_request(client.session, "tasks/update", task.task_id, input_responses=responses)
        assert (await get_task(client.session, task.task_id)).status == "working"


async def test_a_failed_job_is_a_completed_task_whose_result_is_an_error(
    settings: Settings, url: str, store: JobStore
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no search")

    async with listening(settings) as address, working(url, store, fail), connect(address, tasks=True) as client:
        task = await create_task(client)
        ended = await wait_for_end(client, task.task_id)
    assert ended.status == "completed"
    assert ended.result is not None
    assert ended.result.is_error
    output: Any = ended.result.structured_content
    assert output["status"] == "failed"
    assert output["error"]["message"]


async def test_every_process_of_the_service_answers_about_a_task(
    address: str, settings: Settings, url: str, store: JobStore
) -> None:
    async with listening(settings) as other:
        async with connect(address, tasks=True) as client:
            task = await create_task(client, seed=1)
            doomed = await create_task(client)
        async with connect(other, tasks=True) as client:
            await send_task_request(client.session, "tasks/cancel", doomed.task_id)
            assert (await get_task(client.session, task.task_id)).status == "working"
            async with working(url, store):
                await wait_for_end(client, task.task_id)
        async with connect(address, tasks=True) as client:
            assert (await get_task(client.session, doomed.task_id)).status == "cancelled"
            assert (await get_task(client.session, task.task_id)).status == "completed"


async def test_wrong_arguments_make_no_task(address: str, http: httpx.AsyncClient) -> None:
    async with connect(address, tasks=True) as client:
        result = await client.call_tool("solve", {"problem": "?", "budget": {"tokens": 0}})
    assert result.is_error
    assert (await http.get("/v1/jobs")).json()["data"] == []


async def test_a_task_of_another_owner_is_not_found(address: str, store: JobStore) -> None:
    mine, yours = await header(store, "me"), await header(store, "you")
    async with connect(address, mine, tasks=True) as client:
        task = await create_task(client)
    async with connect(address, yours, tasks=True) as client:
        for method, task_id in itertools.product(METHODS, (task.task_id, "job_" + "0" * 32, "786512e2")):
            with pytest.raises(MCPError, match=f"there is no job '{task_id}'") as caught:
                await send_task_request(client.session, method, task_id, input_responses={})
            assert caught.value.code == INVALID_PARAMS
    async with connect(address, mine, tasks=True) as client:
        assert (await get_task(client.session, task.task_id)).status == "working"


async def test_a_client_that_declares_no_tasks_is_told_which_capability_is_missing(address: str) -> None:
    async with connect(address) as client:
        for method in METHODS:
            with pytest.raises(MCPError, match=TASKS) as caught:
                await send_task_request(client.session, method, "job_1", input_responses={})
            assert caught.value.code == MISSING_REQUIRED_CLIENT_CAPABILITY
            assert caught.value.data == {"requiredCapabilities": {"extensions": {TASKS: {}}}}


async def test_methods_of_the_earlier_tasks_do_not_exist(address: str) -> None:
    async with connect(address, tasks=True) as client:
        with pytest.raises(MCPError) as caught:
            await send_task_request(client.session, "tasks/result", "job_1")
    assert caught.value.code == METHOD_NOT_FOUND
    async with connect(address, mode="legacy") as client:
        with pytest.raises(MCPError) as caught:
            await send_task_request(client.session, "tasks/get", "job_1")
    assert caught.value.code == METHOD_NOT_FOUND


class ClaimedTask(Result):
    result_type: Literal["task"]
    task_id: str
