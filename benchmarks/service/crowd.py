"""Many searches at once in one worker: memory, the age of their last sign of life, and the time to stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.service.deployment import OURS, Deployment, proportional_mib
from benchmarks.service.load import submit_all

STOP_SECONDS = 10.0
"""Time in which a worker that is asked to stop is to have handed all of its searches back."""
_SAMPLE_SECONDS = 0.25
_WATCHED_SECONDS = 20.0
_JOBS = "reasoner:jobs:in_progress"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Measurements of one worker. ``ages``: seconds since the last sign of life, of every running job at every look."""

    at_once: int
    idle_mib: float | None
    mib: float | None
    ages: Sequence[float]
    stopped_after: float
    """Seconds from SIGTERM to the end of the process."""
    handed_back: int
    """Jobs that wait again, with no attempt used up."""


def gather_crowd(deployment: Deployment, spec: dict[str, object], count: int) -> Crowd:
    """Submit so many searches at once to one worker, watch them, and stop the worker."""
    worker = deployment.start(OURS, "worker")
    deployment.start(OURS, "api")
    warm = asyncio.run(submit_all(deployment.url(OURS), spec | {"budget": {"tokens": 1}}, 1))
    deployment.until(lambda: deployment.redis.hget(f"reasoner:job:{warm[0]}", "finished"), "a first job has ended")
    idle = proportional_mib(worker)
    ids = asyncio.run(submit_all(deployment.url(OURS), spec, count))
    deployment.until(lambda: deployment.redis.zcard(_JOBS) == count, f"{count} searches run at once")
    ages, pause, ends = list[float](), threading.Event(), time.monotonic() + _WATCHED_SECONDS
    while time.monotonic() < ends:
        ages += _read_ages(deployment, ids)
        pause.wait(_SAMPLE_SECONDS)  # a sample at a time, not a wait for something
    at_once, mib = int(deployment.redis.zcard(_JOBS)), proportional_mib(worker)
    stopped_after = deployment.stop(OURS, "worker")
    pipe = deployment.redis.pipeline(transaction=False)
    for job_id in ids:
        pipe.hmget(f"reasoner:job:{job_id}", "status", "attempt")
    handed_back = sum(pair == ["queued", "0"] for pair in pipe.execute())
    return Crowd(at_once, idle, mib, ages=ages, stopped_after=stopped_after, handed_back=handed_back)


def _read_ages(deployment: Deployment, ids: Sequence[str]) -> list[float]:
    """Return the seconds since the last heartbeat or write of each running job, by the broker's clock."""
    pipe = deployment.redis.pipeline(transaction=False)
    pipe.time()
    for job_id in ids:
        pipe.hmget(f"reasoner:job:{job_id}", "lease", "term", "status")
    (seconds, microseconds), *jobs = pipe.execute()
    now = seconds * 1000 + microseconds / 1000
    return [
        max(0.0, now - (float(lease) - float(term))) / 1000 for lease, term, status in jobs if status == "in_progress"
    ]
