"""Run the Python calls of a job's branches in the sandbox, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.threads.processors import find_processors
from reasoner.deadline import SecondsLeft, run_within
from reasoner.sandbox.cells import CellLimits, CellResult, Ending, run_cells
from reasoner.tools.fences import format_output

MAX_CONCURRENT_CALLS = min(4, find_processors().threads)
"""Number of calls of one job that run at the same time."""

_FATAL: dict[Ending, str] = {
    "timeout": "ended: it ran longer than {seconds:g} seconds",
    "memory": "ended: it needed more than {memory} MB of memory",
    "output": "ended: it printed far more than {output} characters",
    "died": "ended: its process died, by a limit of memory or processes or by a forbidden call",
}
"""Ends of a call that also end its branch, with the text that says so."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    output: str
    ended: Ending
    seconds: float

    @property
    def is_fatal(self) -> bool:
        """True if the call reached a limit, which ends its branch."""
        return self.ended in _FATAL

    def shorten(self, max_chars: int) -> CallResult:
        """Return the result with at most so many characters of output."""
        output = self.output
        if len(output) <= max_chars:
            return self
        head, tail = output[: max_chars - max_chars // 2], output[len(output) - max_chars // 2 :]
        return replace(self, output=f"{head}\n[{len(output) - max_chars} characters left out]\n{tail}")

    def format(self, before: str) -> str:
        """Return the block that follows the text ``before``."""
        return format_output(before, self.output)


class PythonRunner:
    """Runs the calls of one job. The state of a branch is that of its own calls, run in order in one process."""

    def __init__(self, limits: CellLimits, seconds_left: SecondsLeft, *, locked: bool = True) -> None:
        self._limits = limits
        self._seconds_left = seconds_left
        self._locked = locked
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def run(self, cells: Sequence[str]) -> CallResult | None:
        """Run the last of a branch's codes after the others; ``None`` if the job's time ends first.

        Raises ``SandboxRefused`` where the system has no lockdown.
        """
        async with self._slots:
            result = await run_within(self._seconds_left(), lambda: run_cells(cells, self._limits, locked=self._locked))
        return None if result is None else CallResult(self._explain(result), result.ended, result.seconds)

    def _explain(self, result: CellResult) -> str:
        """Return the output, and the reason for which the call was ended."""
        limits = self._limits
        values = {"seconds": limits.seconds, "memory": limits.memory_bytes >> 20, "output": limits.output_chars}
        reason = _FATAL.get(result.ended, "").format(**values)
        lines = [line for line in (result.output.removesuffix("\n"), reason) if line]
        return "\n".join(lines)
