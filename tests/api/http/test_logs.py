"""Logs lead from a request to the job that it submitted, and back."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import httpx
import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from tests.api.conftest import submitted
from workers.store.jobs import JobStore
from workers.store.request_origin import ORIGIN, Origin

SECRET = "the quick brown problem"


@pytest.fixture(autouse=True)
def _loud(_quiet: None) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))


async def test_every_line_about_a_job_names_the_request_that_submitted_it(
    client: httpx.AsyncClient, work: Callable[[str], Awaitable[None]]
) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        client.headers["X-Request-ID"] = "first"
        one = await submitted(client, problem=SECRET, seed=1)
        client.headers["X-Request-ID"] = "second"
        other = await submitted(client, problem=SECRET, seed=1)
        await work(other)
        await work(one)
    for job, request in ((one, "first"), (other, "second")):
        about = [line for line in lines if line.get("job") == job]
        assert {line["request_id"] for line in about} == {request}
        assert [line["event"] for line in about] == ["job submitted", "job claimed", "job ended"]
    requests = [line for line in lines if line["event"] == "request"]
    assert [(line["request_id"], line["status"]) for line in requests] == [("first", 202), ("second", 202)]
    assert SECRET not in str(lines)


async def test_the_jobs_of_a_batch_name_its_request_too(
    client: httpx.AsyncClient, work: Callable[[str], Awaitable[None]]
) -> None:
    spec = {"jobs": [{"problem": "1 + 1?", "strategy": {"name": "greedy"}}] * 2, "budget": {"tokens": 500}}
    with capture_logs(processors=[merge_contextvars]) as lines:
        batch = (await client.post("/v1/batches", json=spec, headers={"X-Request-ID": "many"})).json()
        for job in batch["jobs"]:
            await work(job["id"])
    told = {(line["job"], line["request_id"]) for line in lines if "job" in line}
    assert told == {(job["id"], "many") for job in batch["jobs"]}
    assert any(line.get("batch") == batch["id"] and line["request_id"] == "many" for line in lines)


async def test_a_job_stored_without_an_origin_runs(store: JobStore) -> None:
    job, _ = await store.submit({"problem": "?", "priority": "batch"}, owner="local", queue_cap=10)
    await store.command("HDEL", f"reasoner:job:{job['id']}", "origin")
    claim = await store.claim(job["id"], lease=10, max_attempts=3, worker="w")
    assert claim is not None
    assert claim.origin == Origin() == ORIGIN.get()
