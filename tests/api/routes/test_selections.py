"""``POST /v1/select``: a job like any other, whose result is a ranking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from reasoner.client import AsyncClient
from tests.api.routes.test_jobs import read_events

Work = Callable[[str], Awaitable[None]]
BODY = {"problem": "how?", "candidates": ["\\boxed{1}", "\\boxed{2}", "so \\boxed{2}"], "seed": 1}


async def select(client: httpx.AsyncClient, **fields: Any) -> Any:
    return await client.post("/v1/select", json=BODY | fields)


@pytest.mark.parametrize("by", ["majority", "weighted", "verifier", "tournament"])
async def test_a_selection_is_a_job_with_a_ranking_a_tree_and_a_bill(
    client: httpx.AsyncClient, work: Work, by: str
) -> None:
    response = await select(client, by=by)
    assert response.status_code == 202, response.text
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["spec"]["strategy"] == {"name": "select", "by": by, "schedule": "swiss"}
    await work(job["id"])
    done = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert done["status"] == "completed", done["error"]
    ranking = done["result"]["ranking"]
    assert sorted(item["index"] for item in ranking) == [0, 1, 2]
    assert ranking[0]["node"] == done["result"]["node"]
    assert done["usage"]["generated"] == 0
    assert (done["usage"]["verifier_computed"] > 0) == (by != "majority")
    tree = (await client.get(f"/v1/jobs/{job['id']}/tree")).json()
    assert len(tree["nodes"]) >= 3
    events = await read_events(client, job["id"])
    assert [event["type"] for event in events].count("node") == 3


async def test_a_repeated_selection_is_the_same_job_and_prefer_waits(client: httpx.AsyncClient, work: Work) -> None:
    headers = {"Idempotency-Key": "once"}
    first = await client.post("/v1/select", json=BODY | {"by": "majority"}, headers=headers)
    await work(first.json()["id"])
    again = await client.post("/v1/select", json=BODY | {"by": "majority"}, headers=headers | {"Prefer": "wait=20"})
    assert again.status_code == 200
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["result"]["answer"] == "2"
    assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"candidates": []}, "candidates", "at least 1 item"),
        ({"candidates": [[{"role": "user", "content": "?"}]]}, "candidates", "message of the assistant"),
        ({"candidates": ["x"], "by": "tournament"}, "body", "a tournament needs two"),
        ({"by": "dice"}, "by", "'verifier', 'majority', 'weighted' or 'tournament'"),
        ({"strategy": {"name": "beam"}}, "body", "a selection has no 'strategy'"),
        ({"by": "weighted", "verifier": None}, "body", "needs a verifier"),
        ({"problem": ""}, "problem", "at least 1 character"),
    ],
)
async def test_impossible_selections_are_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], field: str, message: str
) -> None:
    response = await select(client, **fields)
    assert response.status_code == 422
    errors = response.json()["errors"]
    assert any(error["field"].startswith(field) and message in error["message"] for error in errors), errors


async def test_without_candidates_there_is_nothing_to_select(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/select", json={"problem": "how?"})
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == ["candidates"]


async def test_the_client_library_selects(client: httpx.AsyncClient, work: Work) -> None:
    async with AsyncClient("http://127.0.0.1", transport=client._transport) as own:
        job = await own.select("how?", ["\\boxed{1}", "\\boxed{3}"], by="verifier", seed=1)
        await work(job.id)
        done = await own.get(job.id)
    assert done.result is not None
    assert len(done.result.ranking) == 2
