"""``reasoner mcp``: the same tools and tasks on standard streams, for the jobs of a service behind HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from typing import Any

import httpx
import pytest

from tests.api.keyed import header
from tests.api.mcp.clients import MODES, create_task, get_task, launch, send_task_request
from tests.api.mcp.test_tasks import wait_for_end
from tests.api.mcp.test_tools import QUESTION, wait_for_job
from tests.api.openai_client import address, http, worker
from workers.store.jobs import JobStore

__all__ = ["address", "http", "worker"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_question_is_solved_with_progress(
    address: str, http: httpx.AsyncClient, worker: None, mode: str
) -> None:
    reports = list[float]()

    async def note(progress: float, _: float | None, __: str | None) -> None:
        reports.append(progress)

    async with launch("--url", address, mode=mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        assert [tool.name for tool in (await client.list_tools()).tools] == ["solve", "select", "job", "cancel"]
        output: Any = (await client.call_tool("solve", QUESTION, progress_callback=note)).structured_content
        shown: Any = (await client.call_tool("job", {"job_id": output["job_id"]})).structured_content
        refused = await client.call_tool("solve", {"problem": "?", "strategy": {"name": "magic"}})
    job = (await http.get(f"/v1/jobs/{output['job_id']}")).json()
    assert output["answer"] == shown["answer"] == job["result"]["answer"]
    assert shown["search"]["branches"] > 0
    assert reports
    assert refused.is_error
    assert "unknown strategy 'magic'; known are" in str(refused.content)


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_its_client_gives_up_cancels_the_job(
    address: str, http: httpx.AsyncClient, mode: str
) -> None:
    async with launch("--url", address, mode=mode) as client:
        call = asyncio.create_task(client.call_tool("solve", QUESTION))
        job_id = await wait_for_job(http)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        job = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()
    assert job["status"] == "cancelled"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_ends_the_command_and_the_job_that_a_call_waits_for(
    address: str, http: httpx.AsyncClient, number: signal.Signals, status: int
) -> None:
    client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "solve", "arguments": QUESTION}},
    ]
    command = (sys.executable, "-m", "api.cli.main", "mcp", "--url", address)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    process.stdin.write("".join(f"{json.dumps(message)}\n" for message in messages).encode())
    job_id = await wait_for_job(http)
    process.send_signal(number)
    async with asyncio.timeout(200):
        assert await process.wait() == status
    assert (await http.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()["status"] == "cancelled"


async def test_a_task_outlasts_the_process_that_began_it(
    address: str, http: httpx.AsyncClient, store: JobStore, worker: None
) -> None:
    key = (await header(store, "me"))["Authorization"].removeprefix("Bearer ")
    options = ("--url", address, "--key", key)
    async with launch(*options, tasks=True) as client:
        task = await create_task(client, seed=1)
        doomed = await create_task(client, seed=2)
        await send_task_request(client.session, "tasks/cancel", doomed.task_id)
    async with launch(*options, tasks=True) as client:
        ended = await wait_for_end(client, task.task_id)
        assert (await get_task(client.session, doomed.task_id)).status in ("cancelled", "completed")
    assert ended.status == "completed"
    assert ended.result is not None


async def test_a_service_that_cannot_be_reached_or_refuses_the_key_is_named(address: str, store: JobStore) -> None:
    await header(store, "someone")
    for options, expected in (
        (("--url", "http://127.0.0.1:9"), "no service answers at http://127.0.0.1:9"),
        (("--url", address, "--key", "wrong"), "this API key is unknown"),
    ):
        async with launch(*options) as client:
            refused = await client.call_tool("solve", QUESTION)
        assert refused.is_error
        assert expected in str(refused.content)
