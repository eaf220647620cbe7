"""Who is served first."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Service
from tests.chaos.processes import until

pytestmark = pytest.mark.timeout(120)


def test_interactive_jobs_go_before_batch_jobs_that_came_earlier(service: Service) -> None:
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
