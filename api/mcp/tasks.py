"""The extension ``io.modelcontextprotocol/tasks`` (SEP-2663): a job is a task, and the id of one is that of the other.

A client that declares the extension gets a task for each job that it begins. Nothing of it is kept in this process, so
that any process of the service, also one started later, answers the next request about it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    RequestParams,
)
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from api.mcp.jobs import Jobs
from api.mcp.results import build_output
from api.mcp.tools import Context, build_result
from reasoner.client import ServiceError
from reasoner.jobs.job import Job

EXTENSION = "io.modelcontextprotocol/tasks"
POLL_MS = 1000
_STATUS = {"queued": "working", "in_progress": "working", "cancelled": "cancelled"}
"""Status of a task by that of its job. ``completed`` stands for all other ends: ``failed`` is for protocol errors."""


class TaskParams(RequestParams):
    """The parameters of ``tasks/get`` and ``tasks/cancel``."""

    task_id: str


class UpdateTaskParams(TaskParams):
    """The parameters of ``tasks/update``."""

    input_responses: dict[str, Any]


P = TypeVar("P", bound=TaskParams)


def declares_tasks(context: Context) -> bool:
    """Return True if the client of this request takes a task for a result."""
    capabilities = context.session.client_capabilities
    is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
    return is_modern and capabilities is not None and EXTENSION in (capabilities.extensions or {})


def build_created_task(job: Job) -> dict[str, Any]:
    """Return the result of a call that began a job, for a client that declares tasks."""
    return {**_build_task(job, None), "resultType": "task"}


@dataclass(frozen=True, slots=True)
class Tasks:
    """The methods of the extension. ``retention_seconds``: how long jobs are kept after their end, if that is known."""

    find_jobs: Callable[[Context], Jobs]
    retention_seconds: float | None

    def install(self, server: Server[Any]) -> None:
        """Add the methods to a server."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, _require_tasks(self.get))
        server.add_request_handler("tasks/update", UpdateTaskParams, _require_tasks(self.update))
        server.add_request_handler("tasks/cancel", TaskParams, _require_tasks(self.cancel))

    async def get(self, context: Context, params: TaskParams) -> dict[str, Any]:
        job = await self.find_jobs(context).get(params.task_id)
        return {**_build_task(job, self.retention_seconds), "resultType": "complete"}

    async def update(self, context: Context, params: UpdateTaskParams) -> dict[str, Any]:
        """Acknowledge: a job asks its client for nothing, and answers to nothing that was asked are to be ignored."""
        await self.find_jobs(context).get(params.task_id)
        return {}

    async def cancel(self, context: Context, params: TaskParams) -> dict[str, Any]:
        await self.find_jobs(context).cancel(params.task_id)
        return {}


def _require_tasks(
    handle: Callable[[Context, P], Awaitable[dict[str, Any]]],
) -> Callable[[Context, P], Awaitable[dict[str, Any]]]:
    """Return the handler for clients that declare tasks, with refusals as errors of the protocol."""

    async def handle_declared(context: Context, params: P) -> dict[str, Any]:
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(METHOD_NOT_FOUND, "Method not found", context.method)
        if not declares_tasks(context):
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                f"this method is for clients that declare the extension {EXTENSION}",
                {"requiredCapabilities": {"extensions": {EXTENSION: {}}}},
            )
        try:
            return await handle(context, params)
        except ServiceError as error:
            codes = {404: INVALID_PARAMS, 403: INVALID_REQUEST}
            raise MCPError(codes.get(error.status or 0, INTERNAL_ERROR), str(error)) from None

    return handle_declared


def _build_task(job: Job, retention_seconds: float | None) -> dict[str, Any]:
    """Return the fields of ``DetailedTask``. A job is kept without limit until it ends, and then for its retention."""
    status = _STATUS.get(job.status, "completed")
    updated_at = job.finished_at or job.started_at or job.created_at
    kept = None if job.finished_at is None or retention_seconds is None else updated_at + retention_seconds
    task: dict[str, Any] = {
        "taskId": job.id,
        "status": status,
        "statusMessage": _describe(job),
        "createdAt": _format_time(job.created_at),
        "lastUpdatedAt": _format_time(updated_at),
        "ttlMs": None if kept is None else round((kept - job.created_at) * 1000),
        "pollIntervalMs": POLL_MS,
    }
    if status == "completed":
        task["result"] = build_result(build_output(job)).model_dump(by_alias=True, mode="json", exclude_none=True)
    return task


def _describe(job: Job) -> str:
    tokens = f"{job.usage.total} tokens"
    if job.waiting is not None:
        return f"waiting: {job.waiting.reason.replace('_', ' ')}, {tokens}"
    return f"{job.status.replace('_', ' ')}, {tokens}"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
