"""Jobs of the archive through the API: every route reads them, lists search both stores, and an archive may be away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app.app import create_app
from api.http.state import ServiceState
from tests.api import keyed
from tests.api.conftest import submitted
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings
from workers.config.types import ConfigError
from workers.store.jobs import JobStore

AWAY = "postgresql://nobody@127.0.0.1:1/none"
"""Nothing listens on this port."""
Work = Callable[[str], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(url: str, folder: Path, archive_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, ServiceState]]:
    settings = load_settings(redis_url=url, data_dir=folder, archive_url=archive_url, archive_after_seconds=1e-3)
    app = create_app(settings, ScriptedEngine())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield client, app.state.service


@pytest.fixture
async def service(url: str, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, ServiceState]]:
    async with serving(url, tmp_path, f"sqlite:///{tmp_path / 'archive.sqlite3'}") as running:
        yield running


async def move(state: ServiceState) -> None:
    """Move all jobs that have ended."""
    assert state.archiver is not None
    while await state.store.command("ZCARD", "reasoner:jobs:ended"):
        await state.archiver.move()


async def test_every_route_reads_a_job_of_the_archive_as_before(
    service: tuple[httpx.AsyncClient, ServiceState], work: Work
) -> None:
    client, state = service
    job_id = await submitted(client, strategy={"name": "best_of_n", "n": 2})
    response = await client.post("/v1/responses", json={"model": "policy", "input": "1 + 1?", "background": True})
    response_id = response.json()["id"]
    batch = (await client.post("/v1/batches", json={"jobs": [{"problem": "2"}], "budget": {"tokens": 500}})).json()
    assert state.archiver is not None
    for job in (job_id, response_id.replace("resp_", "job_"), batch["jobs"][0]["id"]):
        await work(job)
    paths = [f"/v1/jobs/{job_id}{part}" for part in ("", "?wait=1", "/events?starting_after=2", "/tree")]
    paths += [f"/v1/responses/{response_id}", f"/v1/responses/{response_id}/input_items", f"/v1/batches/{batch['id']}"]
    paths += ["/v1/jobs", "/v1/jobs?status=completed", "/v1/jobs/export?journal=true", "/v1/jobs/export?format=tree"]

    async def read() -> list[tuple[int, str]]:
        answers = [await client.get(path) for path in paths]
        return [(answer.status_code, answer.text) for answer in answers]

    before = await read()
    assert {status for status, _ in before} == {200}
    await move(state)
    assert await state.store.command("EXISTS", f"reasoner:job:{job_id}") == 0
    assert await read() == before
    cancelled = await client.post(f"/v1/jobs/{job_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "completed")
    retried = await client.post(f"/v1/jobs/{job_id}/retry")
    assert (retried.status_code, retried.json()["type"]) == (409, "urn:reasoner:problem:not-retryable")
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await client.get(f"/v1/jobs/{job_id}")).status_code == 404


FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "status=completed": lambda job: job["status"] == "completed",
    "strategy=best_of_n": lambda job: job["spec"]["strategy"]["name"] == "best_of_n",
    "model=policy": lambda job: job["spec"]["model"] == "policy",
    "model=nobody": lambda job: False,
    "name=policy:low": lambda job: job["spec"].get("name") == "policy:low",
    "metadata[team]=red": lambda job: job["spec"]["metadata"].get("team") == "red",
    "metadata[team]=red&metadata[n]=1": lambda job: job["spec"]["metadata"] == {"team": "red", "n": "1"},
    "q=TWO plus": lambda job: "two plus" in job["spec"]["problem"].lower(),
    "q=plu": lambda job: False,
    "q=勾股&metadata[team]=red": lambda job: (
        "勾股" in job["spec"]["problem"] and job["spec"]["metadata"]["team"] == "red"
    ),
    "q=two&strategy=best_of_n&status=completed": lambda job: (
        job["status"] == "completed"
        and "two" in job["spec"]["problem"].lower()
        and job["spec"]["strategy"]["name"] == "best_of_n"
    ),
}


@pytest.mark.parametrize("query", FILTERS)
async def test_a_list_has_the_jobs_of_both_stores_that_its_filters_want(
    service: tuple[httpx.AsyncClient, ServiceState], work: Work, query: str
) -> None:
    client, state = service
    problems = ["Two plus two?", "What is two?", "用勾股定理求解", "Three_plus two plus one", "Four"]
    jobs = []
    for index in range(15):
        strategy = {"name": "best_of_n", "n": 1} if index % 2 else {"name": "self_consistency", "n": 1}
        metadata = {"team": "red" if index % 3 else "blue", "n": str(index % 4)}
        more = {"model": "policy:low"} if index % 5 == 4 else {"strategy": strategy}
        jobs.append(await submitted(client, problem=problems[index % 5], metadata=metadata, **more))
    for job in jobs[:9]:
        await work(job)
    await move(state)
    for job in jobs[9:12]:
        await work(job)
    everything = (await client.get("/v1/jobs?limit=100")).json()["data"]
    assert [job["id"] for job in everything] == jobs[::-1]
    expected = [job["id"] for job in everything if FILTERS[query](job)]
    for limit in (3, 100):
        seen: list[str] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            after = f"&after={seen[-1]}" if seen else ""
            page = (await client.get(f"/v1/jobs?limit={limit}&{query}{after}")).json()
            seen += [job["id"] for job in page["data"]]
        assert seen == expected


async def test_jobs_are_listed_by_the_time_of_their_submission(
    service: tuple[httpx.AsyncClient, ServiceState], work: Work
) -> None:
    client, state = service
    jobs = [await submitted(client) for _ in range(6)]
    for job in jobs[:4]:
        await work(job)
    times = {job: (await client.get(f"/v1/jobs/{job}")).json()["created_at"] for job in jobs}
    await move(state)
    for first, last in ((1, 3), (2, 5), (4, 5)):
        after, before = times[jobs[first]], times[jobs[last]]
        query = f"/v1/jobs?created_after={after}&created_before={before}"
        listed = [job["id"] for job in (await client.get(query)).json()["data"]]
        assert listed == [job for job in jobs[::-1] if after <= times[job] < before]


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ("color=red", "color", "model, name, created_after, created_before, q, owner, metadata[KEY]"),
        ("metadata=red", "metadata", "metadata[KEY]"),
        ("metadata[a]=1&metadata[a]=2", "metadata[a]", "give it once"),
        ("q=%3F", "q", "no word"),
        ("created_after=5&created_before=5", "created_before", "later than 'created_after'"),
        ("created_after=yesterday", "created_after", "valid number"),
        ("&".join(f"metadata[{key}]=1" for key in range(17)), "metadata", "at most 16"),
        ("status=done", "status", "'dead'"),
    ],
)
async def test_a_filter_that_means_nothing_is_refused_by_name(
    service: tuple[httpx.AsyncClient, ServiceState], query: str, field: str, message: str
) -> None:
    client, _ = service
    answer = await client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == field
    assert message in error["message"]


async def test_a_key_lists_other_owners_only_if_it_sees_them(
    service: tuple[httpx.AsyncClient, ServiceState], work: Work, store: JobStore
) -> None:
    client, state = service
    ann, bob = await keyed.header(store, "ann"), await keyed.header(store, "bob")
    admin = await keyed.header(store, "root", "admin", "jobs:read")
    hers, his = await keyed.submitted(client, ann), await keyed.submitted(client, bob)
    await work(hers)
    await work(his)
    await move(state)

    async def listed(headers: dict[str, str], query: str = "") -> list[str]:
        return [job["id"] for job in (await client.get(f"/v1/jobs?{query}", headers=headers)).json()["data"]]

    assert await listed(ann) == await listed(ann, "owner=ann&q=1") == await listed(admin, "owner=ann") == [hers]
    assert await listed(admin, "q=1") == [his, hers]
    answer = await client.get("/v1/jobs?owner=bob", headers=ann)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "owner")
    assert (await client.get(f"/v1/jobs/{his}", headers=ann)).status_code == 404


async def test_while_the_archive_is_away_jobs_run_and_what_is_missing_is_named(
    url: str, tmp_path: Path, work: Work
) -> None:
    async with serving(url, tmp_path, AWAY) as (client, state):
        job_id = await submitted(client)
        await work(job_id)
        assert state.archiver is not None
        await state.archiver._move_and_report()
        assert "Connection refused" in state.archiver.outage
        page = await client.get("/v1/jobs?q=1")
        assert [job["id"] for job in page.json()["data"]] == [job_id]
        assert page.headers["Reasoner-Warning"].startswith("archive-unavailable: ")
        assert (await client.get(f"/v1/jobs/{job_id}/tree")).status_code == 200
        unknown = f"/v1/jobs/job_{'0' * 32}"
        for path in (unknown, f"{unknown}/events", "/v1/jobs/export", f"/v1/jobs?after=job_{'0' * 32}"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:reasoner:problem:archive-unavailable")
            assert "127.0.0.1" not in answer.text
            assert int(answer.headers["Retry-After"]) > 0
        assert "reasoner_archive_up 0.0" in (await client.get("/metrics")).text
        assert (await client.get("/readyz")).status_code == 200
    async with serving(url, tmp_path, f"sqlite:///{tmp_path / 'archive.sqlite3'}") as (client, state):
        await move(state)
        assert (await client.get(f"/v1/jobs/{job_id}")).json()["status"] == "completed"
        text = (await client.get("/metrics")).text
        assert "reasoner_archive_up 1.0" in text
        assert "reasoner_jobs_archived_total 1.0" in text


def test_the_archive_is_beside_an_embedded_broker_and_configured_for_another(tmp_path: Path) -> None:
    embedded = load_settings(data_dir=tmp_path)
    assert (embedded.archive_address, embedded.archive_after) == (f"sqlite:///{tmp_path}/archive.sqlite3", 86_400)
    external = load_settings(data_dir=tmp_path, redis_url="redis://127.0.0.1:1")
    assert (external.archive_address, external.archive_after) == (None, 3600)
    given = load_settings(data_dir=tmp_path, redis_url="redis://127.0.0.1:1", archive_url=AWAY, archive_after_seconds=5)
    assert (given.archive_address, given.archive_after) == (AWAY, 5)
    assert "nobody" not in repr(given)


@pytest.mark.parametrize(
    "url", ["mysql://u:secret@host/db", "sqlite:///relative.sqlite3", "postgresql://host", "archive"]
)
def test_an_archive_of_another_kind_is_refused_with_the_forms_that_there_are(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"archive-url: must be postgresql://USER:PASSWORD@HOST/DATABASE, or sqlite:////PATH"
    ) as refusal:
        load_settings(archive_url=url)
    assert "secret" not in str(refusal.value)
