"""``kill -9`` of the worker in the middle of a beam search: real engine, real broker, real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from api.supervisor import free_port
from reasoner.jobs import Usage
from tests.chaos import processes
from tests.chaos.slow_engine import SlowEngine
from workers.embedded import EmbeddedBroker
from workers.settings import load_settings

RECOVERY_SECONDS = 10.0
JOB = {
    "problem": "Use the numbers 3, 5, 7 to make 26.",
    "strategy": {"name": "beam", "n": 8, "expansions": 2, "max_steps": 8},
    "budget": {"tokens": 100_000},
    "seed": 11,
}


@dataclass
class Service:
    """API, engine and two workers."""

    client: httpx.Client
    redis: redis.Redis
    slow: SlowEngine
    engine: httpx.Client
    workers: dict[int, subprocess.Popen[bytes]]

    def submit(self) -> str:
        response = self.client.post("/v1/jobs", json=JOB)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def job(self, job_id: str, wait: float = 0) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get(f"/v1/jobs/{job_id}", params={"wait": wait}).json()
        return answer

    def log(self, job_id: str) -> list[dict[str, Any]]:
        """The job's stream, read behind the API's back."""
        return [{"seq": entry_id, **fields} for entry_id, fields in self.redis.xrange(f"reasoner:job:{job_id}:log")]

    def holder(self, job_id: str) -> int:
        """Process id of the worker that claimed the job last."""
        return int(str(self.redis.hget(f"reasoner:job:{job_id}", "worker")).rpartition(":")[2])

    def generated_by_engine(self) -> float:
        families = text_string_to_metric_families(self.engine.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "reasoner_engine_generated_tokens_total")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with contextlib.ExitStack() as running:
        broker = running.enter_context(EmbeddedBroker(tmp_path / "data"))
        engine_socket = tmp_path / "engine.sock"
        slow = running.enter_context(SlowEngine(tmp_path / "slow.sock", engine_socket, seconds=0.3))
        settings = load_settings(
            redis_url=broker.url, engine_url=slow.url, port=free_port(), data_dir=tmp_path, concurrency=2
        )
        local = settings.model_copy(update={"engine_url": None})
        running.enter_context(processes.engine(local, engine_socket, tmp_path / "engine.log"))
        running.enter_context(processes.role("api", settings, tmp_path / "api.log"))
        workers = [
            running.enter_context(processes.role("worker", settings, tmp_path / f"worker{index}.log"))
            for index in range(2)
        ]
        url = f"http://127.0.0.1:{settings.port}"
        client = running.enter_context(httpx.Client(base_url=url, timeout=70))
        uds = httpx.HTTPTransport(uds=str(engine_socket))
        engine = running.enter_context(httpx.Client(base_url="http://engine", transport=uds))
        store = running.enter_context(redis.Redis.from_url(broker.url, decode_responses=True))

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/readyz").status_code == 200
            return False

        processes.until(ready, "the service is ready")
        yield Service(client, store, slow, engine, {worker.pid: worker for worker in workers})


@pytest.mark.timeout(240)
def test_a_beam_search_whose_worker_is_killed_goes_on_elsewhere_and_repeats_nothing(service: Service) -> None:
    undisturbed = service.job(service.submit(), wait=60)
    assert undisturbed["status"] == "completed", undisturbed

    service.slow.asked.clear()
    before = service.generated_by_engine()
    job_id = service.submit()

    def nodes() -> list[dict[str, Any]]:
        return [entry for entry in service.log(job_id) if entry["type"] == "node"]

    processes.until(lambda: len(nodes()) >= 10, "the search is in its second level")
    victim = service.holder(job_id)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.time()
    service.workers[victim].wait()
    journaled, asked_before = len(nodes()), set(service.slow.asked)
    lost = len(asked_before) - journaled
    service.slow.asked.clear()

    job = service.job(job_id, wait=60)
    assert job["status"] == "completed", job
    assert job["attempt"] == 2
    assert service.holder(job_id) in set(service.workers) - {victim}

    log = service.log(job_id)
    resumed = next(entry for entry in log if entry["type"] == "job.resumed")
    assert 0 < float(resumed["at"]) - killed_at < RECOVERY_SECONDS

    # Nothing that the journal held was asked for again: only what was lost on the way was.
    assert journaled >= 10
    assert len(asked_before & set(service.slow.asked)) == lost
    assert len(service.slow.asked) == len(set(service.slow.asked))

    # The bill is the sum of the journal, whose keys are unique and whose numbers have no gap.
    entries = [entry for entry in log if "key" in entry]
    assert len({entry["key"] for entry in entries}) == len(entries)
    assert [entry["seq"] for entry in log] == [f"{seq}-0" for seq in range(1, len(log) + 1)]
    spent = sum((Usage.model_validate_json(entry["spend"]) for entry in entries), Usage())
    assert job["usage"] == pytest.approx(spent.model_dump())

    # The engine made no more tokens than are on the bill, but for those that were lost.
    longest = max(node["tokens"] for node in service.client.get(f"/v1/jobs/{job_id}/tree").json()["nodes"])
    wasted = service.generated_by_engine() - before - spent.generated
    assert 0 <= wasted <= lost * longest

    assert job["result"]["answer"] == undisturbed["result"]["answer"]
    assert job["result"]["text"] == undisturbed["result"]["text"]
    assert job["result"]["node"] == undisturbed["result"]["node"]
    assert job["result"]["confidence"] == pytest.approx(undisturbed["result"]["confidence"], abs=1e-5)
