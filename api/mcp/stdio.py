"""The protocol on standard input and output, for the jobs of a service that runs elsewhere."""

from __future__ import annotations

from mcp.server.stdio import stdio_server

from api.mcp.server import build_server
from reasoner.client import AsyncClient


async def serve_stdio(url: str, key: str | None) -> None:
    """Serve one client until it closes standard input. ``url`` and ``key`` are those of the service."""
    async with AsyncClient(url, key) as jobs:
        server = build_server(lambda _: jobs)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
