"""A child process for work that may never end: it is asked one question at a time and killed when it is late.

The usual cure, an alarm signal in the own process, works in the main thread alone and does not stop what is stuck in C
code. The child here limits its own memory and, for the case that its parent dies, its time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

START_PATIENCE = 60.0
"""Seconds for the child to import what it needs on a busy machine."""
MEMORY_BYTES = 2 << 30
MAX_LINE = 1 << 20
"""Bytes of one answer."""
_WAITING = 6.0
"""Times its patience that a parent waits, for a child that gets a sixth of a processor."""
_ORPHANED_SECONDS = 120.0
"""Longest time for one question in a child whose parent is no longer there to kill it."""


class Child:
    """Runs ``python -m MODULE``, whose main calls ``serve``. Starts at the first question; close it at the end."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: Any, patience: float) -> Any:
        """The child's answer; ``None`` when it was late or died, and the next question goes to a new one.

        ``patience``: seconds of processor time, so that a busy machine does not change what is late.
        Questions that come together take turns.
        """
        async with self._turn:
            if self.process is None:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self._module,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=MAX_LINE,
                )
                if await self._exchange(None, START_PATIENCE) is None:
                    return None
            return await self._exchange([patience, question], patience * _WAITING)

    async def close(self) -> None:
        """Ends the child."""
        process, self.process = self.process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _exchange(self, message: Any, patience: float) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(patience):
                if message is not None:
                    self.process.stdin.write(json.dumps(message).encode() + b"\n")
                    await self.process.stdin.drain()
                line = await self.process.stdout.readline()
        except (TimeoutError, ConnectionError, ValueError):  # ValueError: an answer longer than ``MAX_LINE``
            line = b""
        finally:
            if not line:  # late, dead, or the caller was cancelled: an answer to come would be taken for the next one's
                await self.close()
        return json.loads(line) if line else None


def serve(answer: Callable[[Any], Any]) -> None:
    """The child's side: answers JSON lines from stdin on stdout until stdin ends. An exception answers ``False``."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whoever prints does not answer
    _limit_memory()
    print("true", file=out, flush=True)  # ready
    for line in sys.stdin:
        patience, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, patience)  # nobody handles these signals: the system ends the process
        signal.setitimer(signal.ITIMER_REAL, _ORPHANED_SECONDS)
        try:
            reply = answer(question)
        except Exception:  # whatever the question does to the libraries, it is not shown to hold
            reply = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=out, flush=True)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    except (ValueError, OSError) as error:  # macOS has no such limit
        print(f"the memory of this process is not limited: {error}", file=sys.stderr)
