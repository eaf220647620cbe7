"""Workers killed during a batch: all of its jobs end, and its budget is kept."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from reasoner.budget.usage import Usage
from reasoner.jobs.batch import BatchUsage
from tests.chaos import processes
from tests.chaos.conftest import Service

JOBS = [
    {
        "problem": f"Use the numbers 3, 5, {number} to make 26.",
        "strategy": {"name": "weighted_vote", "n": 12},
        "seed": number,
    }
    for number in range(6, 12)
]
TOKENS = 2400

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


def test_a_batch_whose_workers_are_killed_ends_within_its_budget(service: Service) -> None:
    service.start_workers(3)
    service.start_api()
    response = service.client.post("/v1/batches", json={"jobs": JOBS, "budget": {"tokens": TOKENS}})
    assert response.status_code == 202, response.text
    batch_id = response.json()["id"]

    def look() -> dict[str, Any]:
        batch: dict[str, Any] = service.get(f"/v1/batches/{batch_id}")
        return batch

    for part in (0.1, 0.5):
        processes.until(lambda part=part: BatchUsage(**look()["usage"]).total > part * TOKENS, f"{part} of it is spent")
        running = [job["id"] for job in look()["jobs"] if job["status"] == "in_progress"]
        victims = {service.holder(job_id) for job_id in running} & set(service.workers)
        victim = min(victims, default=min(service.workers))
        os.kill(victim, signal.SIGKILL)
        service.workers.pop(victim).wait()

    batch = processes.until(
        lambda: look() if look()["status"] == "completed" else None, "the batch has ended", seconds=120
    )
    assert batch["counts"]["completed"] + batch["counts"]["incomplete"] == len(JOBS)
    jobs = [service.ended(job["id"]) for job in batch["jobs"]]
    spent = sum(Usage.model_validate(job["usage"]).total for job in jobs)
    assert spent == BatchUsage(**batch["usage"]).total <= TOKENS
    assert spent + batch["unassigned"] == TOKENS
    grants = [entry for job in jobs for entry in service.log(job["id"]) if entry["type"] == "grant"]
    assert len(grants) > len(JOBS)  # floors, and slices beyond them
