"""A deployment of real processes, each of which may be killed at any time and is then started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import redis

from api.supervisor import free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from tests.chaos import processes
from workers.embedded import EmbeddedBroker
from workers.settings import load_settings

Role = Literal["worker", "api", "engine", "broker"]
NULL_ENGINE = [sys.executable, "-m", "benchmarks.service.null_engine"]
PAUSE = 0.05
"""Seconds between two looks at what other processes do."""


class Fleet:
    """A broker, an engine without a model, and as many workers and APIs as asked for. A context manager.

    What is killed is started again at once, as a supervisor of processes would.
    """

    def __init__(self, folder: Path, *, workers: int, apis: int, token_seconds: float, **settings: Any) -> None:
        self._folder = folder
        self._running = contextlib.ExitStack()
        self._logs = itertools.count()
        self._engine = [*NULL_ENGINE, str(folder / "engine.sock"), str(token_seconds)]
        self._counts: dict[Role, int] = {"engine": 1, "api": apis, "worker": workers}
        self._processes: dict[Role, list[subprocess.Popen[bytes]]] = {}
        self.broker = EmbeddedBroker(folder / "data")
        self.settings = load_settings(
            redis_url=self.broker.url,
            engine_url=f"unix://{folder / 'engine.sock'}",
            data_dir=folder / "data",
            model=POLICY,
            prm=VERIFIER,
            **settings,
        )
        self.ports = [free_port() for _ in range(apis)]

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as starting:
            starting.push(self._running)
            self._running.enter_context(self.broker)
            self.redis = self._running.enter_context(redis.Redis.from_url(self.broker.url, decode_responses=True))
            for role, count in self._counts.items():
                self._processes[role] = [self._start(role, number) for number in range(count)]
            starting.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def pids(self, role: Role) -> list[int]:
        return [process.pid for process in self._processes[role]]

    def kill(self, role: Role, number: int = 0, *, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends one process of a role, and waits until it has ended."""
        process = self.broker.process if role == "broker" else self._processes[role][number]
        assert process is not None
        process.send_signal(how)
        process.wait(30)

    def restart(self, role: Role, number: int = 0) -> None:
        if role == "broker":
            self.broker.start()
        else:
            self._processes[role][number] = self._start(role, number)

    def holder(self, job_id: str) -> int:
        """The number of the worker that has a job."""
        pid = int(str(self.redis.hget(f"reasoner:job:{job_id}", "worker")).rpartition(":")[2])
        return self.pids("worker").index(pid)

    def running(self) -> dict[str, int]:
        """Jobs that have a worker, with the number of the newest event of each."""
        found = {job_id: self.seq(job_id) for job_id in self.redis.zrange("reasoner:jobs:in_progress", 0, -1)}
        return {job_id: seq for job_id, seq in found.items() if seq is not None}

    def seq(self, job_id: str) -> int:
        return int(str(self.redis.hget(f"reasoner:job:{job_id}", "seq")))

    def log(self, job_id: str) -> list[dict[str, Any]]:
        return [{"seq": entry_id, **fields} for entry_id, fields in self.redis.xrange(f"reasoner:job:{job_id}:log")]

    def _start(self, role: Role, number: int) -> subprocess.Popen[bytes]:
        log = self._folder / f"{role}{number}-{next(self._logs)}.log"
        if role == "engine":
            return self._running.enter_context(processes.process(self._engine, log))
        port = self.ports[number] if role == "api" else 1
        settings = self.settings.model_copy(update={"port": port})
        return self._running.enter_context(processes.role(role, settings, log))


class Client:
    """A client that does not give up: it asks the next API, and the next, until one answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._bases = itertools.cycle([f"http://127.0.0.1:{port}" for port in fleet.ports])
        self._http = httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_connections=None))
        self.refusals: set[int] = set()
        """Statuses other than success that answers had."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, **request: Any) -> Any:
        """The JSON of the first good answer."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                response = await self._http.request(method, next(self._bases) + path, **request)
                if response.is_success:
                    return response.json()
                self.refusals.add(response.status_code)
                assert response.status_code == 503, response.text
            await asyncio.sleep(PAUSE)

    async def submit(self, spec: dict[str, Any], key: str) -> str:
        job = await self.call("POST", "/v1/jobs", json=spec, headers={"Idempotency-Key": key})
        return str(job["id"])

    async def follow(self, job_id: str) -> list[dict[str, Any]]:
        """All events of a job, in the order in which they came, over any number of connections."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"].removeprefix("job.") not in ("completed", "incomplete", "failed"):
            with contextlib.suppress(httpx.TransportError):
                async for event in self._read(job_id, events[-1]["seq"] if events else 0):
                    events.append(event)
            await asyncio.sleep(PAUSE)
        return events

    async def _read(self, job_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
        url, asked = f"{next(self._bases)}/v1/jobs/{job_id}/events", {"starting_after": after}
        async with self._http.stream("GET", url, params=asked) as response:
            if response.status_code != httpx.codes.OK:
                self.refusals.add(response.status_code)
                return
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))
