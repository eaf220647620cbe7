"""The tools ``solve``, ``select``, ``job`` and ``cancel``: their descriptions, and what a call of each does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from anyio import CancelScope
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolResult, TextContent, Tool, ToolAnnotations

from api.conversation.narration import Narration
from api.http.problems import Problem
from api.mcp.arguments import (
    CancelArguments,
    JobArguments,
    SearchArguments,
    SelectArguments,
    SolveArguments,
    parse_model,
)
from api.mcp.jobs import Jobs
from api.mcp.results import JobOutput, build_output
from api.mcp.schemas import build_schema
from reasoner.client import ServiceError
from reasoner.jobs.job import TERMINAL_STATUSES, Job
from reasoner.jobs.spec import SELECTING_STRATEGY

PROGRESS_SECONDS = 0.5
"""Time between two notifications about the progress of a call."""
_OUTAGES = (None, 503)
"""Statuses of a service that cannot answer now: the job that it was asked about goes on."""

Context = ServerRequestContext[Any, Any]

log = structlog.get_logger("reasoner.mcp")


@dataclass(frozen=True, slots=True)
class ToolEntry:
    """A tool. ``begin`` starts a job, which the call waits for or a task stands for; ``answer`` is the whole call."""

    title: str
    description: str
    arguments: type[SearchArguments] | type[CancelArguments]
    annotations: ToolAnnotations
    begin: Callable[[Jobs, dict[str, Any]], Awaitable[Job]] | None = None
    answer: Callable[[Jobs, dict[str, Any]], Awaitable[JobOutput]] | None = None

    def describe(self, name: str) -> Tool:
        """Return the tool for the list of tools."""
        return Tool(
            name=name,
            title=self.title,
            description=self.description,
            input_schema=build_schema(self.arguments, "validation"),
            output_schema=build_schema(JobOutput, "serialization"),
            annotations=self.annotations,
        )


def find_tool(name: str) -> ToolEntry:
    """Return a tool by its name. Raises ``MCPError``."""
    if name not in TOOLS:
        raise MCPError(INVALID_PARAMS, f"Unknown tool: {name}. The tools are {', '.join(TOOLS)}.")
    return TOOLS[name]


def read_arguments(tool: ToolEntry, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments as they were given, without those that are null. Raises ``Problem``."""
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    parsed = parse_model(tool.arguments, given)
    plain = {name: getattr(parsed, name) for name in ("background", "wait_seconds") if name in given}
    return given | plain


def build_result(output: JobOutput) -> CallToolResult:
    """Return the result of a call: an error if the job failed, so that an agent sees it as one."""
    document = output.model_dump(mode="json", exclude_none=True)
    text = output.model_dump_json(exclude_none=True)
    return CallToolResult(
        content=[TextContent(text=text)], structured_content=document, is_error=output.status == "failed"
    )


def build_error(error: Problem | ServiceError) -> CallToolResult:
    """Return a refusal as the result of a call, which an agent can read and mend."""
    text = error.detail if isinstance(error, Problem) else str(error)
    return CallToolResult(content=[TextContent(text=text)], is_error=True)


async def wait_for_job(context: Context, jobs: Jobs, job: Job) -> JobOutput:
    """Return the job at its end, with notifications of its progress meanwhile. A call that is cancelled cancels it.

    Where this process or its connection ends first, the job goes on, and the result says how to get it.
    """
    try:
        await _report_progress(context, jobs, job)
    except ServiceError as error:
        if error.status not in _OUTAGES:
            raise
    except asyncio.CancelledError:
        with CancelScope(shield=True):
            await _cancel_abandoned(jobs, job.id)
        raise
    with contextlib.suppress(ServiceError):
        job = await jobs.get(job.id)
    return build_output(job)


async def _report_progress(context: Context, jobs: Jobs, job: Job) -> None:
    """Follow the job to its end. Progress is its tokens, of those of its budget if it has one in tokens."""
    narration = Narration(job.spec.model_dump(mode="json"), concise=True)
    num_reported, reported_at, line = 0, 0.0, "Queued."
    async for event in jobs.events(job.id):
        line = narration.add(event).rstrip().rpartition("\n")[2] or line
        now = time.monotonic()
        if narration.num_tokens > num_reported and now - reported_at >= PROGRESS_SECONDS:
            num_reported, reported_at = narration.num_tokens, now
            await context.session.report_progress(num_reported, job.spec.budget.tokens, line)


async def _cancel_abandoned(jobs: Jobs, job_id: str) -> None:
    try:
        await jobs.cancel(job_id)
    except ServiceError as error:  # its budget ends it
        log.warning("a job that nobody waits for runs on", job=job_id, reason=str(error))


async def _begin_solving(jobs: Jobs, arguments: dict[str, Any]) -> Job:
    return await jobs.submit(arguments)


async def _begin_selecting(jobs: Jobs, arguments: dict[str, Any]) -> Job:
    strategy: dict[str, Any] = {"name": SELECTING_STRATEGY}
    strategy |= {name: arguments.pop(name) for name in ("by", "schedule") if name in arguments}
    return await jobs.submit({**arguments, "strategy": strategy})


async def _show_job(jobs: Jobs, arguments: dict[str, Any]) -> JobOutput:
    job = await jobs.get(arguments["job_id"])
    wait_seconds = float(arguments.get("wait_seconds", 0))
    if wait_seconds and job.status not in TERMINAL_STATUSES:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                async for _ in jobs.events(job.id, job.last_seq):
                    pass
        job = await jobs.get(job.id)
    return build_output(job, await jobs.tree(job.id))


async def _cancel_job(jobs: Jobs, arguments: dict[str, Any]) -> JobOutput:
    return build_output(await jobs.cancel(arguments["job_id"]))


_BEGINS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)

TOOLS: dict[str, ToolEntry] = {
    "solve": ToolEntry(
        "Solve a hard question",
        "Spend computation on one hard question and return the best answer that it buys, with its confidence and its "
        "bill: many solutions are searched, checked and compared. For problems in which thinking longer helps, such as "
        "mathematics, code, logic and planning; not for a chat or a lookup. Usually 'problem' and a budget, such as "
        '{"effort": "medium"}, are all that is needed. It may take minutes: use "background": true if your client does '
        "not wait so long. If the call is cancelled, so is the job.",
        SolveArguments,
        _BEGINS,
        begin=_begin_solving,
    ),
    "select": ToolEntry(
        "Rank solutions",
        "Rank solutions of one question that you have already, by a verifier's scores, by votes or in a tournament; "
        "nothing new is written. 'ranking' has them best first, by their index from 0. Needs the question as 'problem' "
        "and the 'candidates'.",
        SelectArguments,
        _BEGINS,
        begin=_begin_selecting,
    ),
    "job": ToolEntry(
        "Look at a job",
        "Return a job of 'solve' or 'select': its state, its result once it has ended, its bill, and the search tree "
        "in numbers. 'wait_seconds' waits for the end. Jobs survive restarts of the service and of your client.",
        JobArguments,
        ToolAnnotations(read_only_hint=True, open_world_hint=False),
        answer=_show_job,
    ),
    "cancel": ToolEntry(
        "Cancel a job",
        "Stop a job; nothing is charged afterwards, and the best answer so far is kept. One that has ended stays as it "
        "is. While its worker is being told, the status is in_progress still: 'job' shows the end.",
        CancelArguments,
        ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False),
        answer=_cancel_job,
    ),
}
"""All tools by name."""
