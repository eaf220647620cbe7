"""Disruptions chosen at random from a seed, one after the other, and the recovery time of the affected jobs."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import httpx
import redis

from benchmarks.chaos.fleet import ROLES, Fleet, Role

How = Literal["killed", "terminated", "frozen"]
HOWS: tuple[How, ...] = get_args(How)
"""Kinds of disruptions: SIGKILL; SIGTERM, as in a deployment; SIGSTOP, followed by SIGCONT some seconds later."""
RESTART_SECONDS = 0.5
"""Seconds from the end of a process to its restart, as under ``reasoner serve``."""
FROZEN_SECONDS = (0.5, 5.0)
PAUSE_SECONDS = (0.5, 4.0)
"""Range of the seconds from recovery to the next disruption."""
PATIENCE = 60.0
_SETTLE_SECONDS = 0.1
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned disruption."""

    role: Role
    number: int
    how: How
    frozen: float
    """Seconds between SIGSTOP and SIGCONT, if it is of that kind."""
    pause: float
    """Seconds before it."""


@dataclass(frozen=True, slots=True)
class Disruption:
    """A disruption that has happened. ``jobs``: number of running jobs that it affected; ``seconds``: until all of them
    had made progress, or until an API answered again; ``None`` if nothing was affected.
    """

    planned: Planned
    jobs: int
    seconds: float | None


def plan(seed: int, counts: dict[Role, int]) -> Iterator[Planned]:
    """Yield disruptions for ever; the same ones for the same seed and the same processes."""
    rng = random.Random(seed)
    while True:
        for role in rng.sample(ROLES, len(ROLES)):  # each role equally often
            yield Planned(
                role,
                rng.randrange(counts[role]),
                rng.choice(HOWS),
                rng.uniform(*FROZEN_SECONDS),
                rng.uniform(*PAUSE_SECONDS),
            )


def disrupt(fleet: Fleet, seed: int, seconds: float, tell: Callable[[Disruption], None]) -> None:
    """Cause disruptions for some time; every process runs when this returns. Call it in the thread that started the
    fleet, because processes end with the thread that started them.
    """
    pause, end = threading.Event(), time.monotonic() + seconds
    for planned in plan(seed, {role: fleet.count(role) for role in ROLES}):
        pause.wait(min(planned.pause, max(0.0, end - time.monotonic())))
        if time.monotonic() >= end:
            return
        tell(_strike(fleet, planned))


def _strike(fleet: Fleet, planned: Planned) -> Disruption:
    role, number = planned.role, planned.number
    hit = _unfinished(fleet, _jobs_of(fleet, planned))
    struck = time.monotonic()
    with _down(fleet, planned):
        if (
            role != "broker"
        ):  # Messages already sent have arrived, so any later progress needs the process or its replacement.
            threading.Event().wait(_SETTLE_SECONDS)
            hit = _unfinished(fleet, list(hit))
    left = dict(hit)
    recovered = _wait(lambda: _answers(fleet.ports[number]) if role == "api" else _have_moved(fleet, left))
    seconds = (time.monotonic() if recovered else struck + PATIENCE) - struck
    return Disruption(planned, len(hit), seconds if hit or role == "api" else None)


@contextlib.contextmanager
def _down(fleet: Fleet, planned: Planned) -> Iterator[None]:
    """Stop the process; at the end of the block and of its pause it continues or is restarted."""
    role, number = planned.role, planned.number
    if planned.how == "frozen":
        fleet.signal(role, number, signal.SIGSTOP)
        try:
            yield
            threading.Event().wait(planned.frozen)
        finally:
            fleet.signal(role, number, signal.SIGCONT)
        return
    (fleet.kill if planned.how == "killed" else fleet.terminate)(role, number)
    yield
    threading.Event().wait(RESTART_SECONDS)
    fleet.restart(role, number)


def _jobs_of(fleet: Fleet, planned: Planned) -> list[str]:
    """Return the running jobs that need this process: those of a worker, or all for any other role."""
    running: list[str] = fleet.redis.zrange("reasoner:jobs:in_progress", 0, -1)
    if planned.role != "worker":
        return running
    pid = fleet.pids("worker")[planned.number]
    holders = {job_id: str(fleet.redis.hget(f"reasoner:job:{job_id}", "worker")) for job_id in running}
    return [job_id for job_id, holder in holders.items() if holder.endswith(f":{pid}")]


def _progress(fleet: Fleet, jobs: list[str]) -> dict[str, int]:
    """Return the number of entries in each job's journal, without its events; -1 once it has ended."""
    pipe = fleet.redis.pipeline(transaction=False)
    for job_id in jobs:
        pipe.scard(f"reasoner:job:{job_id}:keys")
        pipe.hexists(f"reasoner:job:{job_id}", "finished")
    found = pipe.execute()
    lengths = [-1 if ended else length for length, ended in zip(found[::2], found[1::2], strict=True)]
    return dict(zip(jobs, lengths, strict=True))


def _unfinished(fleet: Fleet, jobs: list[str]) -> dict[str, int]:
    """Return the progress of those that have not ended, since only they can make more."""
    return {job_id: length for job_id, length in _progress(fleet, jobs).items() if length >= 0}


def _have_moved(fleet: Fleet, before: dict[str, int]) -> bool:
    """Return True once the broker answers and all jobs have made progress; remove those that have from ``before``."""
    try:
        fleet.redis.ping()
        now = _progress(fleet, list(before))
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    for job_id, length in now.items():
        if length != before[job_id]:
            del before[job_id]
    return not before


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=2.0).is_success
    except httpx.TransportError:
        return False


def _wait(condition: Callable[[], bool]) -> bool:
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(_POLL_SECONDS)
    return True
