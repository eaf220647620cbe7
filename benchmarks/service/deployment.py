"""The compared systems as processes: a broker and a null engine, and on them our service and Celery alone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from os import environ, sysconf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import redis

from api.roles.supervisor import free_port
from benchmarks.engine.process import BenchError
from benchmarks.service.null_engine import POLICY, VERIFIER
from workers.broker.embedded import EmbeddedBroker
from workers.config.rate_limits import LimitsTable
from workers.config.settings import Settings, load_settings
from workers.processes.children import read_tail, spawn, stop, wait_for_exit

OURS, PLAIN = "ours", "Celery alone"
_MODULES = {OURS: "api.roles.serve", PLAIN: "benchmarks.service.plain"}
_PATIENCE = 120.0
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class BrokerLoad:
    """A broker's work: requests that it read, bytes that it received and sent, bytes of memory that stay in use, and
    seconds of a core.
    """

    requests: float
    bytes: float
    kept: float
    cpu: float

    def __sub__(self, before: BrokerLoad) -> BrokerLoad:
        return BrokerLoad(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def __truediv__(self, count: int) -> BrokerLoad:
        return BrokerLoad(*(value / count for value in astuple(self)))


class Deployment:
    """Context manager of a broker and an engine in a temporary folder; ``start`` adds systems to them."""

    def __init__(
        self,
        seconds: float,
        *,
        concurrency: int,
        models: Mapping[str, Any] | None = None,
        limits: LimitsTable | None = None,
    ) -> None:
        """``seconds``: the null engine's time for a token. ``concurrency``: jobs that a worker runs at once.

        ``models``: settings of a running engine and its models, instead of the null engine. ``limits``: of our service.
        """
        self._models = models
        self._limits = limits or LimitsTable()
        self._seconds = seconds
        self._concurrency = concurrency
        self._running = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self.pids: dict[tuple[str, str], int] = {}
        """Process ids by system and role."""

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def _begin(self) -> None:
        self.folder = Path(self._running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
        broker = self._running.enter_context(EmbeddedBroker(self.folder))
        self.broker_url = broker.url
        self.redis: redis.Redis = self._running.enter_context(redis.Redis.from_url(broker.url, decode_responses=True))
        if self._models is None:
            self._start_null_engine()

    def _start_null_engine(self) -> None:
        address = self.folder / "engine.sock"
        self.engine_url = f"unix://{address}"
        self._launch("engine", ["benchmarks.service.null_engine", str(address), str(self._seconds)])
        self.until(lambda: _listens(address), "the engine listens")
        transport = httpx.HTTPTransport(uds=str(address))
        self.engine = self._running.enter_context(
            httpx.Client(trust_env=False, transport=transport, base_url="http://engine")
        )

    def start(self, system: str, role: str, number: int = 0) -> int:
        """Start the ``api`` or a ``worker`` of a system. Return its process id; for an API once it answers."""
        settings = self._settings(system)
        name = f"{role}{number or ''} ({system})"
        process = self._launch(name, [_MODULES[system], role], settings.environment())
        if role == "api":
            with httpx.Client(trust_env=False, base_url=self.url(system)) as client:
                self.until(lambda: _answers(client, "/readyz"), f"the API answers ({system})")
        self.pids[system, role] = process.pid
        return process.pid

    def stop(self, system: str, role: str) -> float:
        """Ask a process to end. Return the seconds until it has. Raises ``BenchError`` if it does not."""
        process, started = self._processes.pop(f"{role} ({system})"), time.monotonic()
        process.terminate()
        if not wait_for_exit(process, timeout=_PATIENCE):
            raise BenchError(f"the {role} did not end within {_PATIENCE:.0f} seconds ({system})")
        return time.monotonic() - started

    def url(self, system: str) -> str:
        """Return the address of a system's API."""
        return f"http://127.0.0.1:{self._ports.setdefault(system, free_port())}"

    def asked(self) -> dict[str, int]:
        """Return the numbers of branches, tokens and scores requested from the engine so far."""
        counts: dict[str, int] = self.engine.get("/asked").raise_for_status().json()
        return counts

    def read_broker_load(self) -> BrokerLoad:
        """Return the broker's work since its start."""
        stats, memory, cpu = (self.redis.info(section) for section in ("stats", "memory", "cpu"))
        sent = stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
        used = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        return BrokerLoad(stats["total_reads_processed"], sent, memory["used_memory_dataset"], used)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition. Raises ``BenchError`` when a process ends, or after a timeout."""
        pause, deadline = threading.Event(), time.monotonic() + _PATIENCE
        while not condition():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise BenchError(f"the {name} ended:\n{read_tail(self._log(name))}")
            if time.monotonic() > deadline:
                raise BenchError(f"not within {_PATIENCE:.0f} seconds: {what}")
            pause.wait(_PAUSE)

    def complaints(self) -> list[str]:
        """Return the errors that our service's processes logged, and tracebacks printed outside the log."""
        lines = [line for name in self._processes if OURS in name for line in self._log(name).read_text().splitlines()]
        return [
            line
            for line in lines
            if line.startswith("Traceback") or (line.startswith("{") and json.loads(line)["level"] in _BAD)
        ]

    def _settings(self, system: str) -> Settings:
        models = self._models or {"engine_url": self.engine_url, "model": POLICY, "prm": VERIFIER}
        return load_settings(
            **models,
            redis_url=self.broker_url,
            data_dir=self.folder,
            host="127.0.0.1",
            port=int(self.url(system).rpartition(":")[2]),
            concurrency=self._concurrency,
            api_keys=(),
            limits=self._limits,
        )

    def _launch(self, name: str, module: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *module]
        process = spawn(command, log=self._log(name), env=environ | (env or {}), death_signal=signal.SIGKILL)
        self._running.callback(stop, process, grace=15.0)
        self._processes[name] = process
        return process

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


_BAD = ("error", "critical")


def _listens(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(address)) == 0


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).is_success
    except httpx.TransportError:
        return False


def read_cpu_seconds(pid: int) -> float:
    """Return the seconds of a core that a process and its ended children have used. Only on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / sysconf("SC_CLK_TCK")


def proportional_mib(pid: int) -> float | None:
    """Return the memory of a process in MiB (PSS: shared pages are divided among processes), or ``None`` if
    unavailable.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
