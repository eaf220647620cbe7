"""Order of queues."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Service
from tests.chaos.processes import until

pytestmark = pytest.mark.timeout(120)


def test_interactive_jobs_run_before_earlier_batch_jobs(service: Service) -> None:
    service.settings = service.settings.model_copy(update={"concurrency": 1})
    service.start_api()
    jobs = []
    for priority in ("batch", "batch", "interactive", "interactive"):
        spec = {"problem": "1 + 1?", "strategy": {"name": "greedy"}, "priority": priority}
        jobs.append(service.client.post("/v1/jobs", json=spec).json()["id"])
    until(lambda: service.redis.llen("interactive") == service.redis.llen("batch") == 2, "all messages are sent")
    service.start_workers(1)
    started = {job_id: service.ended(job_id)["started_at"] for job_id in jobs}
    assert sorted(jobs, key=lambda job_id: started[job_id]) == [jobs[2], jobs[3], jobs[0], jobs[1]]


def test_a_pool_runs_only_jobs_of_its_own_queue(service: Service) -> None:
    service.start_api()
    service.settings = service.settings.model_copy(update={"queues": ("batch",)})
    service.start_workers(1)
    jobs = {}
    for priority in ("interactive", "batch"):
        spec = {"problem": "1 + 1?", "strategy": {"name": "greedy"}, "priority": priority}
        jobs[priority] = service.client.post("/v1/jobs", json=spec).json()["id"]
    service.ended(jobs["batch"])
    assert service.get(f"/v1/jobs/{jobs['interactive']}")["status"] == "queued"
    service.settings = service.settings.model_copy(update={"queues": ("interactive", "webhooks")})
    service.start_workers(1)
    service.ended(jobs["interactive"])
    assert service.holder(jobs["interactive"]) != service.holder(jobs["batch"])
