"""The server of the protocol, for any transport. It keeps nothing between two requests."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import structlog
from mcp.server.caching import CacheHint
from mcp.server.context import HandlerResult
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR, CallToolRequestParams, ListToolsResult, PaginatedRequestParams

from api.http.problems import Problem
from api.mcp.jobs import Jobs
from api.mcp.results import build_output
from api.mcp.tasks import Tasks, build_created_task, declares_tasks
from api.mcp.tools import TOOLS, Context, build_error, build_result, find_tool, read_arguments, wait_for_job
from reasoner.client import ServiceError

INSTRUCTIONS = (
    "Reasoner answers one hard question at a time by searching many solutions within a budget. Call 'solve' with a "
    "self-contained problem; 'select' ranks solutions that you have; 'job' and 'cancel' are for jobs in the background."
)
TOOLS_TTL_MS = 300_000

log = structlog.get_logger("reasoner.mcp")


def build_server(find_jobs: Callable[[Context], Jobs], retention_seconds: float | None = None) -> Server[Any]:
    """Return the server. ``find_jobs`` returns the jobs of the caller of a request."""
    tools = ListToolsResult(tools=[tool.describe(name) for name, tool in TOOLS.items()])

    async def list_tools(context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:  # noqa: ARG001
        return tools

    async def call_tool(context: Context, params: CallToolRequestParams) -> HandlerResult:
        tool = find_tool(params.name)
        jobs = find_jobs(context)
        try:
            arguments = read_arguments(tool, params.arguments)
            if tool.answer is not None:
                return build_result(await tool.answer(jobs, arguments))
            assert tool.begin is not None
            in_background = arguments.pop("background", False)
            job = await tool.begin(jobs, arguments)
            if in_background:
                return build_result(build_output(job))
            if declares_tasks(context):
                return build_created_task(job)
            return build_result(await wait_for_job(context, jobs, job))
        except (Problem, ServiceError) as error:
            return build_error(error)
        except MCPError:
            raise
        except Exception:  # the package would send its words to clients of older revisions
            log.exception("request failed")
            raise MCPError(INTERNAL_ERROR, "Internal server error") from None

    server: Server[Any] = Server(
        "reasoner",
        version=version("reasoner"),
        title="Reasoner",
        instructions=INSTRUCTIONS,
        cache_hints={"tools/list": CacheHint(ttl_ms=TOOLS_TTL_MS, scope="public")},
        on_list_tools=list_tools,
    )
    server.add_request_handler("tools/call", CallToolRequestParams, call_tool)
    Tasks(find_jobs, retention_seconds).install(server)
    return server
