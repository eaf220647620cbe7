"""``reasoner mcp``: the Model Context Protocol on standard input and output."""

from __future__ import annotations

from api.cli.jobs import open_service
from api.cli.options import Connection, expand_options
from workers.processes.quiet_imports import end_quietly
from workers.processes.shutdown import run


@expand_options
def mcp(service: Connection) -> None:
    """Serve the tools solve, select, job and cancel to an agent, by the Model Context Protocol on stdin and stdout.

    Uses the service at --url or on the configured port, whose jobs outlast this command; if none runs there, starts one
    for as long as the agent is connected. A running service has the same tools over HTTP, at /mcp.
    """
    with end_quietly():
        from api.mcp.stdio import serve_stdio
    with open_service(service, None) as (client, _):
        run(serve_stdio(client.url, service.key))
