"""Clients of a deployment whose processes are killed, and the invariants of their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from benchmarks.chaos.fleet import NULL_ENGINE, PATIENCE, Fleet, Role
from engine.remote.http import HttpEngine
from reasoner.budget.usage import Usage
from reasoner.jobs.job import TERMINAL_STATUSES
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job

__all__ = ["NULL_ENGINE", "PATIENCE", "Fleet", "Role"]

_PAUSE = 0.05


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll like ``processes.until``, without blocking the clients of this process."""
    never = asyncio.Event()
    async with asyncio.timeout(PATIENCE):
        try:
            while not condition():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(never.wait(), _PAUSE)
        except asyncio.CancelledError as error:
            error.add_note(f"not within {PATIENCE} s: {what}")
            raise


class Client:
    """Client that tries one API after another until one answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._bases = itertools.cycle([f"http://127.0.0.1:{port}" for port in fleet.ports])
        self._http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))
        self.refusals: set[int] = set()
        """The unsuccessful statuses of responses."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, **request: Any) -> Any:
        """Return the JSON of the first successful response."""
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
        """Yield all events of a job in order, over any number of connections."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"].removeprefix("job.") not in TERMINAL_STATUSES:
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
    """Run a job without a service and undisturbed. ``job``: the API's response."""
    engine = HttpEngine(url)
    try:
        return await run_job(JobSpec.model_validate(job["spec"]), engine, MemoryJournal())
    finally:
        await engine.close()


def check(job: dict[str, Any], log: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """Check the invariants of a completed job: one usage, one stream, one end.

    ``log``: the events in the store. ``events``: those received by a client.
    """
    assert job["error"] is None, job["error"]
    entries = [entry for entry in log if "key" in entry]
    assert len({entry["key"] for entry in entries}) == len(entries)
    assert [entry["seq"] for entry in log] == [f"{seq}-0" for seq in range(1, len(log) + 1)]
    assert log[-1]["type"] == f"job.{job['status']}"
    spent = sum((Usage.model_validate_json(entry["spend"]) for entry in entries), Usage())
    assert job["usage"] == pytest.approx(spent.model_dump())
    assert [event["seq"] for event in events] == list(range(1, len(log) + 1))
    assert [event["type"] for event in events] == [entry["type"] for entry in log]
