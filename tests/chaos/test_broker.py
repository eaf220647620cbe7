"""Workers survive the death of their broker in any state."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos import processes
from tests.chaos.fleet import Fleet
from workers.execution.liveness import TOUCH_SECONDS

SEARCH = {"problem": "?", "strategy": {"name": "beam", "n": 4}, "budget": {"tokens": 100_000}, "seed": 1}
SHORT = {"problem": "?", "strategy": {"name": "greedy"}, "seed": 1}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, workers=1, apis=1, token_seconds=0.03, concurrency=2) as fleet:
        processes.until(lambda: ask(fleet, "GET", "/v1/jobs"), "the API answers")
        yield fleet


def ask(fleet: Fleet, method: str, path: str, **request: Any) -> Any:
    """Return the response's JSON; ``None`` unless it is a success."""
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.request(method, f"http://127.0.0.1:{fleet.ports[0]}{path}", timeout=30, **request)
        return answer.json() if answer.is_success else None
    return None


def ended(fleet: Fleet, job_id: str) -> Any:
    def look() -> Any:
        job = ask(fleet, "GET", f"/v1/jobs/{job_id}?wait=20")
        return job if job and job["finished_at"] else None

    return processes.until(look, "the job has ended", seconds=90)


def started(fleet: Fleet, spec: dict[str, Any]) -> str:
    """Submit a job and wait until its search has begun."""
    job_id = str(ask(fleet, "POST", "/v1/jobs", json=spec)["id"])
    processes.until(lambda: fleet.seq(job_id) >= 4, "the search has begun")
    return job_id


def test_running_jobs_survive_a_broker_outage_longer_than_a_lease(tmp_path: Path) -> None:
    settings = {"concurrency": 8, "max_attempts": 1, "lease_seconds": 1.0}
    with Fleet(tmp_path, workers=1, apis=1, token_seconds=0.03, **settings) as fleet:
        processes.until(lambda: ask(fleet, "GET", "/v1/jobs"), "the API answers")
        jobs = [started(fleet, SEARCH | {"seed": seed}) for seed in range(4)]
        fleet.kill("broker")
        threading.Event().wait(2 * fleet.settings.lease_seconds)
        fleet.restart("broker")
        for job_id in jobs:
            job = ended(fleet, job_id)
            assert (job["status"], job["error"], job["attempt"]) == ("completed", None, 1)


def test_the_liveness_file_of_a_worker_ages_without_a_broker(tmp_path: Path) -> None:
    alive = tmp_path / "worker.alive"

    def age() -> float:
        return time.time() - alive.stat().st_mtime

    with Fleet(tmp_path, workers=1, apis=0, token_seconds=0.03, alive_file=alive) as fleet:
        processes.until(alive.exists, "the worker takes jobs")
        fleet.kill("broker")
        processes.until(lambda: age() > 3 * TOUCH_SECONDS, "nobody touches the file")
        fleet.restart("broker")
        processes.until(lambda: age() < TOUCH_SECONDS, "it is touched again")
    assert not alive.exists()


@pytest.mark.parametrize("held", ["a search", pytest.param("the end of a search", marks=pytest.mark.long)])
def test_a_worker_survives_the_death_of_its_broker_and_its_job_needs_one_attempt(fleet: Fleet, held: str) -> None:
    job_id = started(fleet, SEARCH)
    if held == "the end of a search":
        processes.until(lambda: fleet.redis.hget(f"reasoner:job:{job_id}", "finished"), "the search has ended")
    worker = fleet.pids("worker")
    fleet.kill("broker")
    fleet.restart("broker")
    assert ended(fleet, job_id)["attempt"] == 1
    assert ended(fleet, started(fleet, SHORT))["attempt"] == 1
    assert processes.alive(worker[0])
    assert fleet.pids("worker") == worker
