"""``/v1/batches``: many jobs under one budget, and invalid batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from reasoner.budget.usage import Usage
from reasoner.jobs.batch import Batch
from tests.api.conftest import serving
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

JOBS = [{"problem": f"{number} + 1?", "strategy": {"name": "weighted_vote", "n": 4}} for number in range(3)]


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check that the response is an error in OpenAI's format, and return it."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def submitted(client: httpx.AsyncClient, tokens: int = 900) -> Batch:
    response = await client.post("/v1/batches", json={"jobs": JOBS, "budget": {"tokens": tokens}})
    assert response.status_code == 202, response.text
    assert response.headers["Location"] == f"/v1/batches/{response.json()['id']}"
    return Batch.model_validate(response.json())


async def test_a_batch_runs_to_its_end_and_its_jobs_are_ordinary_jobs(
    client: httpx.AsyncClient, store: JobStore, work: Callable[[str], Awaitable[None]]
) -> None:
    batch = await submitted(client)
    assert (batch.status, batch.counts["queued"], batch.jobs and len(batch.jobs)) == ("in_progress", 3, 3)
    for _ in range(100):
        await asyncio.gather(*(work(job.id) for job in batch.jobs or () if job.status == "queued"))
        batch = Batch.model_validate((await client.get(f"/v1/batches/{batch.id}")).json())
        if batch.has_ended:
            break
    assert batch.status == "completed"
    assert batch.usage.total + batch.unassigned == 900
    total = Usage()
    for short in batch.jobs or ():
        job = (await client.get(f"/v1/jobs/{short.id}")).json()
        assert (job["batch"], job["status"], job["spec"]["priority"]) == (batch.id, short.status, "batch")
        assert (job["result"] or {}).get("answer") == short.answer
        usage = Usage.model_validate(job["usage"])
        assert usage.total == short.tokens <= short.granted
        total += usage
        events = await store.load_events(short.id)
        assert usage.total <= sum(event.data["tokens"] for event in events if event.type == "grant") <= short.granted
        tree = (await client.get(f"/v1/jobs/{short.id}/tree")).json()
        assert sum(node["tokens"] for node in tree["nodes"]) == usage.generated
    assert total.total == batch.usage.total


async def test_a_job_of_a_batch_has_only_the_limits_that_it_states(client: httpx.AsyncClient) -> None:
    jobs = [{"problem": "?"}, {"problem": "?", "budget": {"seconds": 9}}, {"problem": "?", "budget": {"effort": "low"}}]
    batch = (await client.post("/v1/batches", json={"jobs": jobs, "budget": {"tokens": 90}})).json()
    specs = [(await client.get(f"/v1/jobs/{job['id']}")).json()["spec"] for job in batch["jobs"]]
    caps = [{name: value for name, value in spec["budget"].items() if value is not None} for spec in specs]
    assert caps == [{}, {"seconds": 9.0}, {"tokens": 5000, "effort": "low"}]


async def test_the_same_idempotency_key_and_body_create_one_batch(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"jobs": JOBS[:2], "budget": {"tokens": 50}}
    key = {"Idempotency-Key": "k"}
    first = await client.post("/v1/batches", json=body, headers=key)
    again = await client.post("/v1/batches", json=body, headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert (first.headers.get("Idempotency-Replayed"), again.headers["Idempotency-Replayed"]) == (None, "true")
    other = await client.post("/v1/batches", json=body | {"budget": {"tokens": 51}}, headers=key)
    assert check_error(other, 400)["code"] == "idempotency_conflict"


async def test_cancelling_a_batch_cancels_its_jobs(client: httpx.AsyncClient) -> None:
    batch = await submitted(client)
    response = await client.post(f"/v1/batches/{batch.id}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "cancelled")
    assert response.json()["counts"]["cancelled"] == 3


async def test_batches_are_listed_newest_first(client: httpx.AsyncClient, settings: Settings) -> None:
    async with serving(settings.model_copy(update={"queue_cap": 100}), ScriptedEngine()) as roomy:
        ids = [(await submitted(roomy)).id for _ in range(3)]
        page = (await roomy.get("/v1/batches", params={"limit": 2})).json()
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (ids[:0:-1], True)
        assert page["data"][0]["jobs"] is None
        rest = (await roomy.get("/v1/batches", params={"after": page["last_id"]})).json()
        assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (ids[:1], False)
        assert (await roomy.get("/v1/batches", params={"after": "batch_x"})).status_code == 400


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        ({}, "input_file_id", "required"),
        ({"jobs": JOBS}, "budget", "required"),
        ({"jobs": [], "budget": {"tokens": 9}}, "jobs", "at least 1"),
        ({"jobs": JOBS * 400, "budget": {"tokens": 9}}, "jobs", "at most 1000"),
        ({"jobs": JOBS, "budget": {}}, "budget.tokens", "required"),
        ({"jobs": JOBS, "budget": {"tokens": 0}}, "budget.tokens", "greater than or equal to 1"),
        ({"jobs": JOBS, "budget": {"tokens": 2}}, "budget", "too few for 3 jobs"),
        ({"jobs": JOBS, "budget": {"tokens": 10, "flops": 1e9}}, "budget.flops", "known fields: tokens"),
        ({"jobs": JOBS, "budget": {"tokens": 10}, "name": "x"}, "name", "known fields: jobs, budget, metadata"),
        ({"jobs": [{"problem": "?"}, {}], "budget": {"tokens": 10}}, "jobs.1", "give 'problem', a text, or 'messages'"),
        (
            {"jobs": [{"problem": "?", "budgets": 1}], "budget": {"tokens": 10}},
            "jobs.0.budgets",
            "known fields: problem, messages",
        ),
        (
            {"jobs": [{"problem": "?"}, {"problem": "?", "strategy": {"name": "x"}}], "budget": {"tokens": 10}},
            "jobs.1.strategy",
            "unknown strategy 'x'",
        ),
        (
            {"jobs": [{"problem": "?"}, {"problem": "?", "model": "gpt"}], "budget": {"tokens": 10}},
            "jobs.1.model",
            "served are policy",
        ),
        (
            {"jobs": [{"problem": "?", "budget": {"cost": 1}}], "budget": {"tokens": 10}},
            "jobs.0.budget.cost",
            "has no prices",
        ),
        ({"jobs": JOBS, "budget": {"tokens": 10}, "metadata": {"a": 1}}, "metadata.a", "valid string"),
    ],
)
async def test_an_invalid_field_is_named_with_valid_values(
    settings: Settings, body: Any, field: str, hint: str
) -> None:
    async with serving(settings.model_copy(update={"body_cap": 1 << 20}), ScriptedEngine()) as client:
        status = 404 if field.endswith("model") else 400  # as OpenAI's clients expect it
        error = check_error(await client.post("/v1/batches", json=body), status)
    assert f"{field}: " in error["message"], error
    assert hint in error["message"], error


@pytest.mark.parametrize("batch_id", ["batch_" + "0" * 32, "x", "%00", "job_" + "0" * 32])
@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("POST", "/cancel")])
async def test_an_unknown_batch_is_not_found(
    client: httpx.AsyncClient, batch_id: str, method: str, suffix: str
) -> None:
    assert check_error(await client.request(method, f"/v1/batches/{batch_id}{suffix}"), 404)["code"] == "no_such_batch"


async def test_a_batch_too_large_for_the_queue_is_refused_as_a_whole(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/batches", json={"jobs": JOBS * 2, "budget": {"tokens": 60}})
    assert "more than 5 jobs would wait" in check_error(response, 503)["message"]
    assert (await client.get("/v1/jobs")).json()["data"] == []
