"""Worker processes of the compared systems, and the packages of an interpreter."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import benchmarks
from workers.processes.children import read_tail, stop

_START_SECONDS = 600.0
"""Maximum seconds for loading a checkpoint, including its conversion for a peer on first use."""
_CALL_SECONDS = 1800.0
_ROOT = Path(benchmarks.__file__).parents[1]
# This folder comes last on the path, because the peers' interpreter may have other versions of packages that it has.
_LAUNCH = f"import sys; sys.path.append({str(_ROOT)!r}); from benchmarks.engine.worker import main; main()"
_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "def version(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


class BenchError(Exception):
    """A system failed or is missing; the message names it."""


class Worker:
    """A system in a process of its own, which ends with this object, and with this process however that ends."""

    def __init__(
        self,
        system: str,
        folder: Path,
        *,
        threads: int,
        log: Path,
        python: str = sys.executable,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Start the process; ``ready`` waits until it has loaded. ``log`` gets what its libraries print. ``options``
        are the system's own, ``name`` is its name in errors. Raises ``BenchError``.
        """
        self.system = name or system
        self._log = log
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    [python, "-P", "-c", _LAUNCH, system, str(folder), str(threads), json.dumps(options or {})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,
                )
        except OSError as error:
            raise BenchError(f"{self.system} could not start: {error}") from None
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and those that it started, which may keep its output open."""
        stop(self._process, grace=2.0)
        with suppress(ProcessLookupError):  # there is none left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a call that the ended process did not read
            self._process.stdin.close()

    def ready(self, timeout: float = _START_SECONDS) -> Any:
        """Wait until the checkpoint is loaded; return what the loading took. Raises ``BenchError``."""
        return self._answer("load the checkpoint", timeout)

    def call(self, name: str, timeout: float = _CALL_SECONDS, **arguments: Any) -> Any:
        """Call a function of the worker and wait for its result. Raises ``BenchError``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it ended, or was ended by ``close``
            raise self._ended(name) from None
        return self._answer(name, timeout)

    def _answer(self, what: str, timeout: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise BenchError(f"{self.system} did not {what} within {timeout:.0f} seconds") from None
        if not line:
            raise self._ended(what)
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise BenchError(f"{self.system} could not {what}: {answer['error']}")
            return answer["result"]
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{self.system} could not {what}: its answer is {line[:100]!r}") from None

    def _ended(self, what: str) -> BenchError:
        words = read_tail(self._log)
        return BenchError(f"{self.system} ended before it could {what}" + (f":\n{words}" if words else ""))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(b"")


def installed(packages: tuple[str, ...], python: str = sys.executable) -> dict[str, str]:
    """Return the versions of those packages that an interpreter has. Raises ``BenchError`` if it cannot be run."""
    try:
        found = subprocess.run(
            [python, "-c", _VERSIONS, *packages], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"{python} is not a Python interpreter that works: {error}") from None
    versions: dict[str, str | None] = json.loads(found.stdout)
    return {name: version for name, version in versions.items() if version is not None}


def resident_bytes() -> float | None:
    """Return the process's bytes in physical memory; ``None`` where the system has no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
