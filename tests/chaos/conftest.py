"""A service of real processes around one real engine that is slowed down."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from api.roles.supervisor import free_port
from reasoner.budget.usage import Usage
from tests.chaos import processes
from tests.chaos.slow_engine import SlowEngine
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import Settings, load_settings

JOB = {
    "problem": "Use the numbers 3, 5, 7 to make 26.",
    "strategy": {"name": "beam", "n": 8, "expansions": 2, "max_steps": 8},
    "budget": {"tokens": 100_000},
    "seed": 11,
}


class Service:
    """A broker, with the workers and APIs that a test starts; reads their state directly from Redis."""

    def __init__(self, folder: Path, slow: SlowEngine, running: contextlib.ExitStack, **more: Any) -> None:
        """``more``: settings of the service beyond those of a deployment in this folder."""
        self.slow = slow
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._running = running
        self.broker = running.enter_context(EmbeddedBroker(folder))
        self.settings: Settings = load_settings(
            redis_url=self.broker.url, engine_url=slow.url, port=free_port(), data_dir=folder, concurrency=2, **more
        )
        self.client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{self.settings.port}", timeout=70))
        # A test may wait for an entry for a minute, and a read of this client ends after five seconds by default.
        connection = redis.Redis.from_url(self.broker.url, decode_responses=True, socket_timeout=90)
        self.redis = running.enter_context(connection)

    def start_api(self) -> subprocess.Popen[bytes]:
        api = self._running.enter_context(processes.role("api", self.settings, self._folder / "api.log"))
        processes.until(lambda: self.get("/readyz") is not None, "the API is ready")
        return api

    def start_workers(self, count: int) -> None:
        for _ in range(count):
            log = self._folder / f"worker{len(self.workers)}.log"
            worker = self._running.enter_context(processes.role("worker", self.settings, log))
            self.workers[worker.pid] = worker

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the response's JSON; ``None`` unless it is a success."""
        with contextlib.suppress(httpx.TransportError):
            response = self.client.get(path, params=parameters)
            return response.json() if response.status_code == 200 else None
        return None

    def submit(self, job: dict[str, Any] = JOB) -> str:
        response = self.client.post("/v1/jobs", json=job)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def ended(self, job_id: str) -> dict[str, Any]:
        """Wait for the end of the job, check the invariants of ended jobs, and return it."""

        def look() -> dict[str, Any] | None:
            job: dict[str, Any] | None = self.get(f"/v1/jobs/{job_id}", wait=30)
            return job if job is not None and job["finished_at"] is not None else None

        job = processes.until(look, "the job has ended", seconds=90)
        assert job["error"] is None, job["error"]
        log = self.log(job_id)
        entries = [entry for entry in log if "key" in entry]
        assert len({entry["key"] for entry in entries}) == len(entries)
        assert [entry["seq"] for entry in log] == [f"{seq}-0" for seq in range(1, len(log) + 1)]
        assert [entry["type"] for entry in log if "result" in entry["data"]] == [f"job.{job['status']}"]
        spent = sum((Usage.model_validate_json(entry["spend"]) for entry in entries), Usage())
        assert job["usage"] == pytest.approx(spent.model_dump())
        return job

    def log(self, job_id: str) -> list[dict[str, Any]]:
        return [{"seq": entry_id, **fields} for entry_id, fields in self.redis.xrange(f"reasoner:job:{job_id}:log")]

    def nodes(self, job_id: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log(job_id) if entry["type"] == "node"]

    def event(self, job_id: str, kind: str) -> dict[str, Any]:
        """Wait for the first event of a type and return it."""
        return processes.until(
            lambda: next((entry for entry in self.log(job_id) if entry["type"] == kind), None), f"there is a {kind}"
        )

    def search_is_running(self, job_id: str) -> int:
        """Wait until a search is in its second level; return the process id of its worker."""
        processes.until(lambda: len(self.nodes(job_id)) >= 10, "the search is in its second level")
        return self.holder(job_id)

    def holder(self, job_id: str) -> int:
        return int(str(self.redis.hget(f"reasoner:job:{job_id}", "worker")).rpartition(":")[2])

    def generated_by_engine(self) -> float:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.slow.engine))) as client:
            families = text_string_to_metric_families(client.get("http://engine/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "reasoner_engine_generated_tokens_total")


@pytest.fixture(scope="session")
def slow_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowEngine]:
    folder = tmp_path_factory.mktemp("engine")
    socket = folder / "engine.sock"
    with (
        processes.engine(load_settings(), socket, folder / "engine.log"),
        SlowEngine(folder / "slow.sock", socket, seconds=0.3) as slow,
    ):
        processes.until(socket.exists, "the engine listens")
        yield slow


@pytest.fixture
def service(tmp_path: Path, slow_engine: SlowEngine) -> Iterator[Service]:
    with contextlib.ExitStack() as running:
        yield Service(tmp_path, slow_engine, running)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, slow_engine: SlowEngine) -> dict[str, Any]:
    """Return the undisturbed result of the job that the tests disturb."""
    with contextlib.ExitStack() as running:
        service = Service(tmp_path_factory.mktemp("undisturbed"), slow_engine, running)
        service.start_workers(1)
        service.start_api()
        job = service.ended(service.submit())
    assert job["status"] == "completed", job
    result: dict[str, Any] = job["result"]
    return result


def same(result: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two results are equal except for the last digits of scores, which depend on the batch.

    Scores of the bundled reward model in float32 differ by 2e-5 at most (``tests.prm.checkpoints.score_gap``), and sums
    and shares of a few of them by more.
    """
    floats = "confidence"
    rest = {name: value for name, value in result.items() if name != floats}
    return bool(
        rest == {name: value for name, value in other.items() if name != floats}
        and result[floats] == pytest.approx(other[floats], abs=1e-4)
    )
