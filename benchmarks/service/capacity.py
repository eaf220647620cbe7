"""``python -m benchmarks.service.capacity [JOBS]``: what a short job leaves in Redis, in memory and on disk."""

from __future__ import annotations

import sys
from functools import partial

import httpx

from benchmarks.service.deployment import OURS, Deployment
from reasoner.jobs.job import TERMINAL_STATUSES

SPEC = {"problem": "1 + 1?", "strategy": {"name": "best_of_n", "n": 4}}


def measure(jobs: int) -> dict[str, float]:
    """Run this many searches on an engine without a model. Return the generated tokens and bytes of one of them."""
    with Deployment(0.0, concurrency=32) as deployment:
        deployment.start(OURS, "api")
        deployment.start(OURS, "worker")
        with httpx.Client(trust_env=False, base_url=deployment.url(OURS), timeout=60) as client:
            _run(deployment, client, jobs=1)  # loads scripts
            file, memory = _read_bytes(deployment)
            tokens = _run(deployment, client, jobs=jobs)
            file_now, memory_now = _read_bytes(deployment)
    return {
        "generated tokens": tokens / jobs,
        "bytes of the append-only file": (file_now - file) / jobs,
        "bytes of memory": (memory_now - memory) / jobs,
    }


def _run(deployment: Deployment, client: httpx.Client, *, jobs: int) -> int:
    """Run jobs to their ends. Return the tokens that they generated."""
    ids = [client.post("/v1/jobs", json=SPEC | {"seed": seed}).raise_for_status().json()["id"] for seed in range(jobs)]
    tokens = 0
    for job_id in ids:
        deployment.until(partial(_has_ended, client, job_id), f"the end of {job_id}")
        tokens += client.get(f"/v1/jobs/{job_id}").json()["usage"]["generated"]
    return tokens


def _has_ended(client: httpx.Client, job_id: str) -> bool:
    return client.get(f"/v1/jobs/{job_id}").raise_for_status().json()["status"] in TERMINAL_STATUSES


def _read_bytes(deployment: Deployment) -> tuple[int, int]:
    file = deployment.redis.info("persistence")["aof_current_size"]
    return int(file), int(deployment.redis.info("memory")["used_memory_dataset"])


def main() -> None:
    measured = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    for name, value in measured.items():
        print(f"{value:12,.0f} {name} per job")


if __name__ == "__main__":
    main()
