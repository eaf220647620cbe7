"""Whether two answers are the same mathematics, decided by math-verify in a process of its own.

Symbolic simplification can run for ever. The usual cure, an alarm signal, works in the main thread alone and kills
nothing that is stuck in C code. Here the question goes to a child process that is killed when it is late; "late" means
"not shown to be equal". The child starts at the first question that needs it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence

PATIENCE = 5.0
"""Seconds for one comparison."""
START_PATIENCE = 60.0
"""Seconds for the child to import sympy on a busy machine."""
_NUMBER = re.compile(r"-?\d+(/\d+)?")


class Equivalence:
    """Compares answers. Use as an async context manager; comparisons are made one at a time."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._known: dict[tuple[str, str], bool] = {}

    async def __aenter__(self) -> Equivalence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kill()

    async def representative(self, answer: str, others: Sequence[str]) -> str:
        """The first of ``others`` that is equivalent to ``answer``, else ``answer`` itself."""
        for other in others:
            if await self.equal(other, answer):
                return other
        return answer

    async def equal(self, a: str, b: str) -> bool:
        if a == b:
            return True
        if _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b):
            return False  # canonical numbers are equal only as strings
        if (a, b) not in self._known:
            self._known[a, b] = await self._ask(a, b)
        return self._known[a, b]

    async def _ask(self, a: str, b: str) -> bool:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "reasoner.equivalence_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            await self._exchange(None, START_PATIENCE)
        answer = await self._exchange([a, b], PATIENCE)
        return answer is True

    async def _exchange(self, question: list[str] | None, patience: float) -> object:
        """Sends a question and reads the answer; ``None`` when the child was late or died, and it is killed then."""
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            return None
        try:
            if question is not None:
                self._child.stdin.write(json.dumps(question).encode() + b"\n")
                await self._child.stdin.drain()
            async with asyncio.timeout(patience):
                line = await self._child.stdout.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        if not line:
            await self._kill()
            return None
        return json.loads(line)

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.communicate()
