"""A deployment of real processes, each of which can be killed at any time and restarted."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from os import environ
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import httpx
import redis

from api.roles.supervisor import engine_command, free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from workers.broker.embedded import STOP_SIGNAL, EmbeddedBroker
from workers.config.settings import load_settings
from workers.processes.children import spawn, stop

Role = Literal["worker", "api", "engine", "broker"]
ROLES: tuple[Role, ...] = get_args(Role)
NULL_ENGINE = [sys.executable, "-m", "benchmarks.service.null_engine"]
PATIENCE = 120.0
"""Maximum seconds to wait for an event: far more than any takes, also on a busy machine."""
_STOP_SECONDS = 15.0


class Fleet:
    """A broker, an engine, and ``workers`` and ``apis`` processes. A context manager.

    The caller restarts the processes that it kills, as a supervisor would.
    """

    def __init__(
        self, folder: Path, *, workers: int, apis: int, token_seconds: float | None = None, **settings: Any
    ) -> None:
        """``token_seconds``: seconds for a token in an engine without a model; ``None`` runs an engine with the
        configured models.
        """
        self.folder = folder
        self._running = contextlib.ExitStack()
        self._logs = itertools.count()
        self._counts: dict[Role, int] = {"engine": 1, "api": apis, "worker": workers}
        self._processes: dict[Role, list[subprocess.Popen[bytes]]] = {}
        self.broker = EmbeddedBroker(folder / "data")
        address = folder / "engine.sock"
        models = {} if token_seconds is None else {"model": POLICY, "prm": VERIFIER}
        self.settings = load_settings(
            redis_url=self.broker.url,
            engine_url=f"unix://{address}",
            data_dir=folder / "data",
            **models,
            **settings,
        )
        self._engine = (
            engine_command(self.settings, ["--uds", str(address)])
            if token_seconds is None
            else [*NULL_ENGINE, str(address), str(token_seconds)]
        )
        self.ports = [free_port() for _ in range(apis)]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as starting:
            starting.push(self._running)
            self._running.enter_context(self.broker)
            # The type stubs do not cover decoded, non-None responses.
            self.redis: Any = self._running.enter_context(redis.Redis.from_url(self.broker.url, decode_responses=True))
            for role, count in self._counts.items():
                self._processes[role] = [self._start(role, number) for number in range(count)]
            starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    def count(self, role: Role) -> int:
        """Return the number of processes of a role."""
        return self._counts.get(role, 1)

    def pids(self, role: Role) -> list[int]:
        """Return the process ids of a role, by number."""
        return [process.pid for process in self._processes[role]]

    def process(self, role: Role, number: int = 0) -> subprocess.Popen[bytes]:
        """Return one process of a role."""
        process = self.broker.process if role == "broker" else self._processes[role][number]
        assert process is not None
        return process

    def add(self, role: Role) -> None:
        """Start one more process of a role."""
        self._processes[role].append(self._start(role, len(self._processes[role])))

    def signal(self, role: Role, number: int, what: signal.Signals) -> None:
        """Send a signal to one process of a role."""
        self.process(role, number).send_signal(what)

    def kill(self, role: Role, number: int = 0) -> None:
        """Kill one process of a role, and wait until it has ended."""
        process = self.process(role, number)
        process.kill()
        process.wait(PATIENCE)

    def terminate(self, role: Role, number: int = 0) -> None:
        """Terminate one process of a role, and wait until it has ended."""
        request = STOP_SIGNAL if role == "broker" else signal.SIGTERM
        stop(self.process(role, number), grace=PATIENCE, request=request)

    def restart(self, role: Role, number: int = 0) -> None:
        """Restart an ended process."""
        if role == "broker":
            self.broker.start()
        else:
            self._processes[role][number] = self._start(role, number)

    def asked(self) -> dict[str, int]:
        """Return the numbers of branches, tokens and scores requested from the engine since its start. For one without
        a model.
        """
        with httpx.Client(
            trust_env=False, transport=httpx.HTTPTransport(uds=str(self.folder / "engine.sock"))
        ) as client:
            counts: dict[str, int] = client.get("http://engine/asked").json()
        return counts

    def ended_by_themselves(self) -> list[Role]:
        """Return the roles with a process that has ended by itself."""
        found = [role for role, running in self._processes.items() for each in running if each.poll() is not None]
        return found + (["broker"] if self.broker.ended else [])

    def running(self) -> dict[str, int]:
        """Return the jobs that a worker runs, with the number of the newest event of each."""
        found = {job_id: self.seq(job_id) for job_id in self.redis.zrange("reasoner:jobs:in_progress", 0, -1)}
        return {job_id: seq for job_id, seq in found.items() if seq is not None}

    def seq(self, job_id: str) -> int:
        """Return the number of a job's newest event."""
        return int(str(self.redis.hget(f"reasoner:job:{job_id}", "seq")))

    def log(self, job_id: str) -> list[dict[str, Any]]:
        """Return the whole stream of a job, each entry with its id as ``seq``."""
        return [{"seq": entry_id, **fields} for entry_id, fields in self.redis.xrange(f"reasoner:job:{job_id}:log")]

    def _start(self, role: Role, number: int) -> subprocess.Popen[bytes]:
        log = self.folder / f"{role}{number}-{next(self._logs)}.log"
        command, env = self._engine, dict(environ)
        if role != "engine":
            port = self.ports[number] if role == "api" else self.settings.port
            command = [sys.executable, "-m", "api.roles.serve", role]
            env |= self.settings.model_copy(update={"port": port}).environment()
        process = spawn(command, log=log, env=env, death_signal=signal.SIGKILL)
        self._running.callback(stop, process, grace=_STOP_SECONDS)
        return process
