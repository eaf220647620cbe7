"""Retries of failed jobs over REST and on the command line."""

from __future__ import annotations

import json

import httpx
import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from reasoner.jobs.job import JobError
from tests.api.conftest import submitted
from tests.specs import build_spec
from workers.store.jobs import JobStore


async def failed(client: httpx.AsyncClient, store: JobStore) -> str:
    job_id = await submitted(client)
    held = await store.claim(job_id, lease=60, max_attempts=3, worker="w")
    assert held is not None
    await store.finish(held, "failed", error=JobError(code="engine_error", message="out of memory"))
    return job_id


async def test_a_failed_job_is_queued_again_and_its_stream_continues(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await failed(client, store)
    response = await client.post(f"/v1/jobs/{job_id}/retry")
    assert (response.status_code, response.json()["status"], response.json()["error"]) == (202, "queued", None)
    held = await store.claim(job_id, lease=60, max_attempts=3, worker="w")
    assert held is not None
    await store.finish(held, "cancelled")
    lines = (await client.get(f"/v1/jobs/{job_id}/events")).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events][2:] == ["job.failed", "job.queued", "job.resumed", "job.cancelled"]
    assert events[3]["data"] == {"reason": "retry"}


async def test_a_job_that_has_not_failed_is_not_retried(client: httpx.AsyncClient) -> None:
    response = await client.post(f"/v1/jobs/{await submitted(client)}/retry")
    assert (response.status_code, response.json()["type"]) == (409, "urn:reasoner:problem:not-retryable")
    assert "queued" in response.json()["detail"]


async def test_dead_jobs_are_listed_and_counted(client: httpx.AsyncClient, store: JobStore) -> None:
    dead, _ = await failed(client, store), await submitted(client)
    assert (await client.get("/v1/jobs", params={"status": "dead"})).json()["data"] == []
    await client.post(f"/v1/jobs/{dead}/retry")
    for _ in range(2):  # a lease of no length expires at once
        await store.claim(dead, lease=0, max_attempts=1, worker="w")
    listed = (await client.get("/v1/jobs", params={"status": "dead"})).json()["data"]
    assert [(job["id"], job["error"]["code"]) for job in listed] == [(dead, "max_attempts")]
    assert "reasoner_dead_jobs 1.0" in (await client.get("/metrics")).text.splitlines()


def test_the_command_line_retries_a_failed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        job = {"id": "job_1", "status": "queued", "created_at": 0.0, "spec": build_spec(problem="?").model_dump()}
        return httpx.Response(202, json=job)

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(**options | {"transport": httpx.MockTransport(answer)}))
    result = CliRunner().invoke(app, ["jobs", "retry", "job_1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["status"] == "queued"
    assert asked == [("POST", "/v1/jobs/job_1/retry")]
