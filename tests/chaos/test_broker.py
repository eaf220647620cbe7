"""Workers outlive their broker, whatever they have in hand when it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos import processes
from tests.chaos.fleet import Fleet

SEARCH = {"problem": "?", "strategy": {"name": "beam", "n": 4}, "budget": {"tokens": 100_000}, "seed": 1}
SHORT = {"problem": "?", "strategy": {"name": "greedy"}, "seed": 1}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, workers=1, apis=1, token_seconds=0.03, concurrency=2) as fleet:
        processes.until(lambda: ask(fleet, "GET", "/v1/jobs"), "the API answers")
        yield fleet


def ask(fleet: Fleet, method: str, path: str, **request: Any) -> Any:
    """The answer's JSON, or ``None`` while there is no good answer."""
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
    """A new job whose search has begun."""
    job_id = str(ask(fleet, "POST", "/v1/jobs", json=spec)["id"])
    processes.until(lambda: fleet.seq(job_id) >= 4, "the search has begun")
    return job_id


@pytest.mark.parametrize("held", ["a search", "the end of a search"])
def test_a_worker_lives_on_when_the_broker_dies_under_it_and_its_job_has_one_attempt(fleet: Fleet, held: str) -> None:
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
