"""Run the cells of a branch: Python that a model writes while it reasons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reasoner.sandbox.runner import START_SECONDS, SandboxRefused, open_reader, read_line, send_task, start_process

Ending = Literal["ok", "error", "timeout", "memory", "output", "died"]
"""End of a cell: by itself, by an exception, by the limit of its time, memory or output, or with its process."""

_ENDINGS: tuple[Ending, ...] = ("ok", "error", "timeout", "memory", "output")


@dataclass(frozen=True, slots=True)
class CellLimits:
    """Limits of one call. ``seconds``: of all cells of the branch together, since the earlier ones are run again."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_chars: int = 4000


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of the last cell."""

    output: str
    """Its printed text, with the value of its last expression and its error; shortened in the middle if too long."""
    ended: Ending
    seconds: float


async def run_cells(cells: Sequence[str], limits: CellLimits, *, locked: bool = True) -> CellResult:
    """Run cells in order in one new process with one namespace, and return the result of the last.

    The earlier ones restore the state of their branch, so that siblings share none. Random numbers and hashes are
    seeded, so they find the same state; only the clock differs. An error in an earlier cell, which was shown when it
    ran first, does not stop the later ones. ``locked=False`` omits the lockdown, as in ``run_tests``. Raises
    ``SandboxRefused`` if ``locked`` is true and the lockdown is unavailable.
    """
    ours, theirs = os.pipe()
    task: dict[str, Any] = {"role": "notebook", "cells": list(cells), "output_chars": limits.output_chars}
    task |= {"seconds": limits.seconds, "memory_bytes": limits.memory_bytes, "locked": locked, "writes": theirs}
    transport: asyncio.BaseTransport | None = None
    line: dict[str, Any] | None = None
    is_late = False
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reasoner-") as folder:
        process: asyncio.subprocess.Process | None = None
        try:
            process = await start_process((theirs,), folder)
            os.close(theirs)
            theirs = -1
            reader, transport = await open_reader(ours, limit=8 * limits.output_chars + (1 << 16))
            ours = -1
            try:
                async with asyncio.timeout(START_SECONDS):
                    await send_task(process, task)
                    line = await read_line(reader)
                began = time.monotonic()
                if line is not None and "refused" not in line:
                    async with asyncio.timeout(limits.seconds + 3):
                        line = await read_line(reader)
            except TimeoutError:
                line, is_late = None, True
        finally:
            for end in (ours, theirs):
                if end >= 0:
                    os.close(end)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if transport is not None:
                transport.close()
    seconds = time.monotonic() - began
    if line is not None and "refused" in line:
        raise SandboxRefused(str(line["refused"]))
    if line is None:
        return CellResult("", "timeout" if is_late or seconds >= limits.seconds else "died", seconds)
    ended: Ending = next((ending for ending in _ENDINGS if ending == line.get("ended")), "died")
    return CellResult(str(line.get("output", ""))[: limits.output_chars + 100], ended, seconds)
