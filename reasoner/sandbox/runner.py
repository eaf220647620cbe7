"""Run an answer's tests: start solver and tester, wait within the limits, end both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINE = 1 << 16
"""Maximum size of one result in bytes."""
_MAIN = Path(__file__).with_name("main.py")
START_SECONDS = 60.0
"""Maximum time in seconds for both interpreters to start, before the time limit of the tests begins."""


class SandboxRefused(Exception):
    """This system cannot lock a process down, and the configuration requires it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one answer. ``seconds`` bounds the wall-clock time of all tests and each process's processor time."""

    seconds: float = 10.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """Results of the tests in order: ``reasons`` holds the reason of each failure, ``None`` for passed tests."""

    reasons: tuple[str | None, ...]

    @property
    def share(self) -> float:
        return sum(reason is None for reason in self.reasons) / len(self.reasons)


async def run_tests(code: str, tests: Sequence[str], limits: Limits, *, locked: bool = True) -> Verdict:
    """Run the tests against an answer's code. A test that did not finish has failed.

    ``locked=False`` omits the lockdown: time, memory and file sizes are still limited and the environment is empty, but
    the code can read the user's files, use the network, and fake results through the tester's pipe. Raises
    ``SandboxRefused`` if ``locked`` is true and the lockdown is unavailable.
    """
    to_solver, to_tester, results = os.pipe(), os.pipe(), os.pipe()
    shared: dict[str, Any] = {"seconds": limits.seconds, "memory_bytes": limits.memory_bytes, "locked": locked}
    solver = shared | {"role": "solver", "code": code, "reads": to_solver[0], "writes": to_tester[1]}
    tester = shared | {"role": "tester", "tests": list(tests), "reads": to_tester[0], "writes": to_solver[1]}
    tester["results"] = results[1]
    ours = {*to_solver, *to_tester, *results}
    processes: list[asyncio.subprocess.Process] = []
    transport: asyncio.BaseTransport | None = None
    lines: list[dict[str, Any] | None] = []
    with tempfile.TemporaryDirectory(prefix="reasoner-") as folder:
        try:
            for task in (solver, tester):
                fds = tuple(int(task[name]) for name in ("reads", "writes", "results") if name in task)
                processes.append(await start_process(fds, folder))
                for fd in fds:
                    os.close(fd)
                    ours.discard(fd)
            reader, transport = await open_reader(results[0])
            ours.discard(results[0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    await asyncio.gather(*(send_task(*pair) for pair in zip(processes, (solver, tester), strict=True)))
                    lines.append(await read_line(reader))
                async with asyncio.timeout(limits.seconds):
                    while lines[-1] is not None and len(lines) <= len(tests):
                        lines.append(await read_line(reader))
        finally:
            for fd in ours:
                os.close(fd)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # each process is the leader of its own group
            for process in processes:
                await process.wait()
            if transport is not None:
                transport.close()
    return _build_verdict(lines, len(tests))


async def start_process(fds: tuple[int, ...], folder: str) -> asyncio.subprocess.Process:
    """Start a process of the sandbox as the leader of its own group, with these open descriptors."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-s", "-S", "-P"),  # as -I, but with the seed of hashes
        str(_MAIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        pass_fds=fds,
        start_new_session=True,
    )


async def send_task(process: asyncio.subprocess.Process, task: dict[str, Any]) -> None:
    """Send a process its task, after which its standard input is at its end."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # the process died, so its results will be missing
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
        await process.stdin.wait_closed()


async def open_reader(fd: int, limit: int = MAX_LINE) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """Return a reader of lines of at most ``limit`` bytes, and its transport, which owns the descriptor."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    return reader, transport


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next line; ``None`` at the end and for an invalid line, which untrusted code may have written."""
    try:
        document = json.loads(await reader.readline())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _build_verdict(lines: Sequence[dict[str, Any] | None], count: int) -> Verdict:
    results = [line for line in lines if line is not None]
    if results and "refused" in results[0]:
        raise SandboxRefused(str(results[0]["refused"]))
    reasons = [None if line.get("passed") is True else str(line.get("reason")) for line in results[1 : count + 1]]
    return Verdict((*reasons, *["it did not end in time, or its process died"] * (count - len(reasons))))
