"""Load: many waiting jobs, and clients that follow some of them from the first event to the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.service.deployment import OURS, Deployment, proportional_mib
from reasoner.jobs.job import TERMINAL_STATUSES

_SENDERS = 16
"""Number of clients that submit concurrently."""
_PATIENCE = 300.0
_TIMEOUT = httpx.Timeout(60.0, read=_PATIENCE)


@dataclass(frozen=True, slots=True)
class Borne:
    """Results of a load run. ``errors``: one line for each. ``seconds``: from the worker's start to the last job's end.
    ``api_mib``: the API's memory while all jobs wait.
    """

    errors: list[str]
    seconds: float
    api_mib: float | None


async def submit_all(url: str, spec: dict[str, Any], count: int) -> list[str]:
    """Submit jobs concurrently and return their ids. Raises ``httpx.HTTPError`` if one is refused."""
    left = iter(range(count))
    async with httpx.AsyncClient(trust_env=False, base_url=url, timeout=_TIMEOUT) as client:

        async def sender() -> list[str]:
            return [str((await client.post("/v1/jobs", json=spec)).raise_for_status().json()["id"]) for _ in left]

        sent = await asyncio.gather(*(sender() for _ in range(_SENDERS)))
    return [job_id for each in sent for job_id in each]


async def bear(deployment: Deployment, spec: dict[str, Any], queued: int, streams: int) -> Borne:
    """Submit the jobs while there is no worker, follow the first ``streams`` of them, then start a worker."""
    url = deployment.url(OURS)
    ids = await submit_all(url, spec, queued)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, base_url=url, timeout=_TIMEOUT, limits=limits) as client:
        begun = [asyncio.Event() for _ in range(streams)]
        following = [
            asyncio.create_task(follow(client, job_id, event)) for job_id, event in zip(ids, begun, strict=False)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        api_mib = proportional_mib(deployment.pids[OURS, "api"])
        started = time.perf_counter()
        await asyncio.to_thread(deployment.start, OURS, "worker")
        jobs = [await _ended(client, job_id) for job_id in ids]
        seconds = time.perf_counter() - started
        errors = [error for error in await asyncio.gather(*following) if error is not None]
    errors += [f"{job['id']} is {job['status']}: {job['error']}" for job in jobs if job["status"] != "completed"]
    return Borne(errors, seconds, api_mib)


async def follow(client: httpx.AsyncClient, job_id: str, begun: asyncio.Event) -> str | None:
    """Read a job's events to its end. Return a description of what was wrong with them, or None."""
    seen: list[int] = []
    kind = ""
    try:
        async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            if answer.status_code != httpx.codes.OK:
                return f"{job_id}: the stream was answered with {answer.status_code}"
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    seen.append(int(value))
                elif name == "event":
                    kind = value
                    begun.set()
    except httpx.HTTPError as error:
        return f"{job_id}: the stream broke after event {seen[-1:]}: {type(error).__name__}"
    finally:
        begun.set()  # do not wait for a stream that could not be opened
    return wrong(job_id, seen, kind)


def wrong(job_id: str, seen: Sequence[int], last: str) -> str | None:
    """Return the error of a stream with these sequence numbers and this last event, or None."""
    if list(seen) != list(range(1, len(seen) + 1)):
        return f"{job_id}: the stream has gaps: {list(seen)}"
    if last.removeprefix("job.") not in TERMINAL_STATUSES:
        return f"{job_id}: the stream ended with {last or 'nothing'}"
    return None


async def _ended(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """Return the job when it has ended, or as it is after a timeout."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        response = await client.get(f"/v1/jobs/{job_id}", params={"wait": 30})
        job: dict[str, Any] = response.raise_for_status().json()
        if job["status"] in TERMINAL_STATUSES or time.monotonic() > deadline:
            return job
