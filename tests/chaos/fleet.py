"""A deployment of real processes, each of which may be killed at any time and is then started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import redis

from api.supervisor import free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from engine.client import HttpEngine
from reasoner.jobs import TERMINAL, JobSpec, Usage
from reasoner.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from tests.chaos import processes
from workers.embedded import EmbeddedBroker
from workers.settings import load_settings

Role = Literal["worker", "api", "engine", "broker"]
NULL_ENGINE = [sys.executable, "-m", "benchmarks.service.null_engine"]
PATIENCE = 120.0
"""Seconds after which what has not happened will not: far more than it takes, also on a machine with other work."""
_PAUSE = 0.05


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls, as ``processes.until`` does, and lets the clients of this process go on meanwhile."""
    never = asyncio.Event()
    async with asyncio.timeout(PATIENCE):
        try:
            while not condition():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(never.wait(), _PAUSE)
        except asyncio.CancelledError as error:
            error.add_note(f"not within {PATIENCE} s: {what}")
            raise


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

    def kill(self, role: Role, number: int = 0) -> None:
        """Ends one process of a role, and waits until it has ended."""
        process = self.broker.process if role == "broker" else self._processes[role][number]
        assert process is not None
        process.kill()
        process.wait(PATIENCE)

    def restart(self, role: Role, number: int = 0) -> None:
        if role == "broker":
            self.broker.start()
        else:
            self._processes[role][number] = self._start(role, number)

    def asked(self) -> dict[str, int]:
        """What the engine was asked for since it started: branches, their tokens, scores."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self._folder / "engine.sock"))) as client:
            counts: dict[str, int] = client.get("http://engine/asked").json()
        return counts

    def ended_by_themselves(self) -> list[Role]:
        """Roles of which a process is gone that nobody has killed."""
        found = [role for role, running in self._processes.items() for each in running if each.poll() is not None]
        return found + (["broker"] if self.broker.ended else [])

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
        settings = self.settings
        if role == "api":
            settings = settings.model_copy(update={"port": self.ports[number]})
        return self._running.enter_context(processes.role(role, settings, log))


class Client:
    """A client that does not give up: it asks the next API, and the next, until one answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._bases = itertools.cycle([f"http://127.0.0.1:{port}" for port in fleet.ports])
        self._http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))
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
            await asyncio.sleep(_PAUSE)

    async def submit(self, spec: dict[str, Any], key: str) -> str:
        job = await self.call("POST", "/v1/jobs", json=spec, headers={"Idempotency-Key": key})
        return str(job["id"])

    async def follow(self, job_id: str) -> list[dict[str, Any]]:
        """All events of a job, in the order in which they came, over any number of connections."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"].removeprefix("job.") not in TERMINAL:
            with contextlib.suppress(httpx.TransportError):
                async for event in self._read(job_id, events[-1]["seq"] if events else 0):
                    events.append(event)
            await asyncio.sleep(_PAUSE)
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


async def alone(url: str, job: dict[str, Any]) -> JobOutcome:
    """What becomes of a job without a service and without trouble: ``job`` is what the API answered."""
    engine = HttpEngine(url)
    try:
        return await run_job(JobSpec.model_validate(job["spec"]), engine, MemoryJournal())
    finally:
        await engine.close()


def check(job: dict[str, Any], log: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """What holds for every job that has ended well: one bill, one stream, one end. ``log`` is what the store has,
    ``events`` what a client got."""
    assert job["error"] is None, job["error"]
    entries = [entry for entry in log if "key" in entry]
    assert len({entry["key"] for entry in entries}) == len(entries)
    assert [entry["seq"] for entry in log] == [f"{seq}-0" for seq in range(1, len(log) + 1)]
    assert log[-1]["type"] == f"job.{job['status']}"
    spent = sum((Usage.model_validate_json(entry["spend"]) for entry in entries), Usage())
    assert job["usage"] == pytest.approx(spent.model_dump())
    assert [event["seq"] for event in events] == list(range(1, len(log) + 1))
    assert [event["type"] for event in events] == [entry["type"] for entry in log]
