"""The protocol's own client, over HTTP and on a process's standard streams, and a client's side of its tasks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from mcp.client.client import Client
from mcp.client.extension import advertise
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult, Request, RequestParams, Result
from pydantic import ConfigDict

TASKS = "io.modelcontextprotocol/tasks"
MODES = ("auto", "legacy")
"""Negotiations of the client: with ``auto`` it finds the newest revision, with ``legacy`` it opens as older ones."""


class TaskParams(RequestParams):
    task_id: str
    input_responses: dict[str, Any] | None = None


class TaskRequest(Request[TaskParams, Literal["tasks/get", "tasks/update", "tasks/cancel", "tasks/result"]]):
    """A request about a task; the extension wants its id in a header, too."""

    method: Literal["tasks/get", "tasks/update", "tasks/cancel", "tasks/result"]
    params: TaskParams
    name_param = "taskId"


class Task(Result):
    """A task as the extension's schema has it, where unknown fields are kept."""

    model_config = ConfigDict(extra="allow")
    task_id: str
    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    created_at: str
    last_updated_at: str
    ttl_ms: int | None
    poll_interval_ms: int | None = None
    result: CallToolResult | None = None
    result_type: str = "complete"


@contextlib.asynccontextmanager
async def connect(
    address: str, key: dict[str, str] | None = None, *, tasks: bool = False, mode: str = "auto"
) -> AsyncIterator[Client]:
    """Yield a client of the service at an address; ``key`` is its header, ``tasks`` declares the extension."""
    async with create_mcp_http_client(headers=key) as http:
        transport = streamable_http_client(f"{address}/mcp", http_client=http)
        extensions = [advertise(TASKS)] if tasks else []
        async with Client(transport, mode=mode, extensions=extensions) as client:
            yield client


def launch(*options: str, tasks: bool = False, mode: str = "auto") -> Client:
    """Return a client that starts ``reasoner mcp`` with these options."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "api.cli.main", "mcp", *options], env=dict(os.environ)
    )
    return Client(server, mode=mode, extensions=[advertise(TASKS)] if tasks else [])


async def create_task(client: Client, tool: str = "solve", **arguments: Any) -> Task:
    """Call a tool and return the task that stands for its result."""
    params = CallToolRequestParams(name=tool, arguments={"problem": "1 + 1?", **arguments})
    return await client.session.send_request(CallToolRequest(params=params), Task)


async def get_task(session: ClientSession, task_id: str) -> Task:
    return await session.send_request(TaskRequest(method="tasks/get", params=TaskParams(task_id=task_id)), Task)


async def send_task_request(session: ClientSession, method: Any, task_id: str, **params: Any) -> Result:
    return await session.send_request(TaskRequest(method=method, params=TaskParams(task_id=task_id, **params)), Result)
