"""The protocol on standard input and output, for the jobs of a service that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from typing import cast

import anyio
from mcp.server.stdio import stdio_server

from api.mcp.server import build_server
from reasoner.client import AsyncClient


async def serve_stdio(url: str, key: str | None) -> None:
    """Serve one client until it closes standard input. ``url`` and ``key`` are those of the service."""
    async with AsyncClient(url, key) as jobs:
        server = build_server(lambda _: jobs)
        lines = cast("anyio.AsyncFile[str]", _read_lines())  # of which only the lines are read
        async with stdio_server(stdin=lines) as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())


async def _read_lines() -> AsyncIterator[str]:
    """Yield the lines of standard input.

    The thread that reads them is left alone when the process ends: nothing can cancel a read, and the package's own
    reader would keep a process from ending by a signal until its client writes the next line.
    """
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str](1)

    def read() -> None:
        with contextlib.suppress(RuntimeError), open(0, encoding="utf-8", errors="replace", closefd=False) as stdin:
            for line in itertools.chain(stdin, [""]):
                asyncio.run_coroutine_threadsafe(lines.put(line), loop).result()

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while line := await lines.get():
        yield line
