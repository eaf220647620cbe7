"""Training data over HTTP: each format's rows, filters, going on, Parquet, owners, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import redis

from api.routes import export as export_module
from reasoner.jobs.events import Event
from reasoner.training_data import parquet
from reasoner.training_data.formats import FORMATS
from tests.api import keyed
from tests.api.conftest import submitted
from workers.store.jobs import JobStore

Work = Callable[[str], Awaitable[None]]

SEARCH = {"strategy": {"name": "best_of_n", "n": 8}, "record_logprobs": True}


async def rows_of(client: httpx.AsyncClient, **parameters: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of an export, and its summary."""
    response = await client.get("/v1/jobs/export", params={"summary": True, **parameters})
    assert response.status_code == 200, response.text
    *rows, last = [json.loads(line) for line in response.text.splitlines()]
    return rows, last["summary"]


async def worked(client: httpx.AsyncClient, work: Work, **spec: Any) -> str:
    job_id = await submitted(client, **spec)
    await work(job_id)
    return job_id


@pytest.mark.parametrize("format", FORMATS)
async def test_rows_have_the_columns_of_their_format_and_those_of_all_rows(
    client: httpx.AsyncClient, work: Work, format: str
) -> None:
    job_id = await worked(client, work, **SEARCH)
    rows, summary = await rows_of(client, format=format)
    assert summary == {"jobs": 1, "rows": len(rows), "left_out": {}}
    finished = (await client.get(f"/v1/jobs/{job_id}")).json()["finished_at"]
    for row in rows:
        assert list(row) == list(FORMATS[format].row.__annotations__)
        assert (row["job"], row["finished_at"]) == (job_id, finished)


async def test_pairs_differ_by_the_margin_and_hold_no_solution_twice(client: httpx.AsyncClient, work: Work) -> None:
    await worked(client, work, strategy={"name": "best_of_n", "n": 16})
    rows, _ = await rows_of(client, format="preference")
    assert rows
    used = [message["content"] for row in rows for side in ("chosen", "rejected") for message in row[side]]
    assert len(set(used)) == len(used)
    assert all(row["score_chosen"] > row["score_rejected"] for row in rows)
    gaps = sorted(row["score_chosen"] - row["score_rejected"] for row in rows)
    wide, _ = await rows_of(client, format="preference", margin=gaps[-1])
    assert [row["score_chosen"] - row["score_rejected"] for row in wide] == [gaps[-1]]


async def test_labels_by_answers_say_which_solutions_state_the_chosen_one(
    client: httpx.AsyncClient, work: Work
) -> None:
    job_id = await worked(client, work, strategy={"name": "best_of_n", "n": 16})
    answer = (await client.get(f"/v1/jobs/{job_id}")).json()["result"]["answer"]
    rows, _ = await rows_of(client, format="unpaired", by="answer")
    assert {row["label"] for row in rows} == {True, False}
    for row in rows:
        stated = re.findall(r"\\boxed{(\d+)}", row["completion"][0]["content"])
        assert row["label"] == (stated[-1:] == [answer])


async def test_filters_leave_out_the_other_jobs(client: httpx.AsyncClient, work: Work) -> None:
    greedy = await worked(client, work, strategy={"name": "greedy"}, metadata={"run": "a", "set": "x,y"})
    beam = await worked(client, work, strategy={"name": "beam", "n": 4}, metadata={"run": "a"})
    best = {job: (await client.get(f"/v1/jobs/{job}")).json() for job in (greedy, beam)}

    async def jobs(**parameters: Any) -> list[str]:
        rows, _ = await rows_of(client, format="tree", **parameters)
        return [row["job"] for row in rows]

    assert await jobs() == [greedy, beam]
    assert await jobs(strategy="beam") == [beam]
    assert await jobs(metadata=["run=a", "set=x,y"]) == [greedy]
    assert await jobs(metadata="run=b") == []
    assert await jobs(since=best[beam]["finished_at"]) == [beam]
    assert await jobs(until=best[beam]["finished_at"]) == [greedy]
    assert await jobs(status="failed") == []
    assert await jobs(model="other") == []
    assert await jobs(min_confidence=best[beam]["result"]["confidence"], strategy="beam") == [beam]
    scores = {node["id"]: node["score"] for node in (await client.get(f"/v1/jobs/{beam}/tree")).json()["nodes"]}
    score = scores[best[beam]["result"]["node"]]
    assert await jobs(min_score=score, strategy="beam") == [beam]
    assert await jobs(min_score=min(1.0, score + 1e-6), strategy="beam") == []


async def test_an_export_goes_on_behind_any_row_so_that_no_job_comes_twice(
    client: httpx.AsyncClient, work: Work, store: JobStore
) -> None:
    jobs = [await worked(client, work, strategy={"name": "greedy"}) for _ in range(4)]
    ended = (await client.get(f"/v1/jobs/{jobs[1]}")).json()["finished_at"]
    for index in ("reasoner:jobs:ended", "reasoner:jobs:of:local:ended"):
        await store.command("ZADD", index, round(ended * 1000), jobs[2])
    await store.command("HSET", f"reasoner:job:{jobs[2]}", "finished", f"{ended:.3f}")
    rows, _ = await rows_of(client, format="tree")
    assert [row["job"] for row in rows] == [jobs[0], *sorted(jobs[1:3]), jobs[3]]
    await store.delete(rows[0]["job"])  # the position is known without the job
    for number, row in enumerate(rows):
        more, _ = await rows_of(client, format="tree", since=row["finished_at"], after=row["job"])
        assert more == rows[number + 1 :]


async def test_an_export_outlasts_a_short_absence_of_the_broker(
    client: httpx.AsyncClient, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await worked(client, work, strategy={"name": "greedy"}) for _ in range(3)]
    load, calls = JobStore.load_events, 0

    async def load_or_fail(store: JobStore, job_id: str, after: int = 0) -> list[Event]:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise redis.ConnectionError("away")
        return await load(store, job_id, after)

    monkeypatch.setattr(JobStore, "load_events", load_or_fail)
    monkeypatch.setattr(export_module, "PAUSE_SECONDS", 0.0)
    rows, _ = await rows_of(client, format="tree")
    assert [row["job"] for row in rows] == jobs


async def test_what_no_row_can_be_made_of_is_counted_by_its_reason(client: httpx.AsyncClient, work: Work) -> None:
    await worked(client, work, strategy={"name": "greedy"})
    await worked(client, work, problem="Which?", candidates=["\\boxed{1}", "\\boxed{2}"])
    cancelled = await submitted(client)
    await client.post(f"/v1/jobs/{cancelled}/cancel")
    assert (await rows_of(client, format="rollouts"))[1]["left_out"] == {"not_recorded": 3}
    assert (await rows_of(client, format="tree"))[1]["left_out"] == {"no_branch": 1}
    assert (await rows_of(client, format="unpaired"))[1]["left_out"]["candidates_of_the_client"] == 1


@pytest.mark.parametrize("format", FORMATS)
async def test_a_parquet_file_has_the_rows_of_the_lines_in_bounded_row_groups(
    client: httpx.AsyncClient, work: Work, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    for _ in range(3):
        await worked(client, work, **SEARCH)
    rows, summary = await rows_of(client, format=format)
    response = await client.get("/v1/jobs/export", params={"format": format, "file": "parquet"})
    assert response.headers["content-type"] == export_module.PARQUET
    file = pq.ParquetFile(io.BytesIO(response.content))
    assert json.loads(file.metadata.metadata[parquet.SUMMARY_KEY.encode()]) == summary
    assert file.num_row_groups == len({row["job"] for row in rows}) == 3
    assert [without_nulls(row) for row in file.read().to_pylist()] == [without_nulls(row) for row in rows]


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null: in Parquet an optional key of a message is always there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


async def test_without_pyarrow_only_parquet_is_refused(
    client: httpx.AsyncClient, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worked(client, work, **SEARCH)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    response = await client.get("/v1/jobs/export?format=sft&file=parquet")
    assert response.status_code == 501
    assert "reasoner[parquet]" in response.json()["detail"]
    assert len((await rows_of(client, format="sft"))[0]) == 1


async def test_an_owner_gets_rows_of_its_own_jobs_only(client: httpx.AsyncClient, store: JobStore, work: Work) -> None:
    headers = {name: await keyed.header(store, name) for name in ("her", "him")}
    jobs = {name: await keyed.submitted(client, headers[name], **SEARCH) for name in headers}
    for job_id in jobs.values():
        await work(job_id)
    for name, job_id in jobs.items():
        response = await client.get("/v1/jobs/export?format=tree", headers=headers[name])
        assert [json.loads(line)["job"] for line in response.text.splitlines()] == [job_id]
    assert (await client.get("/v1/jobs/export?format=tree")).status_code == 401


@pytest.mark.parametrize(
    ("query", "field", "remedy"),
    [
        ("format=dpo", "format", "preference"),
        ("format=sft&file=csv", "file", "parquet"),
        ("file=parquet", "file", "jsonl"),
        ("format=sft&journal=true", "journal", "format=jobs"),
        ("format=sft&margin=0.1", "margin", "format=preference"),
        ("format=preference&margin=2", "margin", "1"),
        ("format=tree&by=score", "by", "leave it out"),
        ("format=prm&by=votes", "by", "answer"),
        ("format=sft&after=job_1", "after", "since"),
        ("format=sft&since=9&until=3", "until", "later"),
        ("format=sft&status=queued", "status", "completed"),
        ("summary=true", "summary", "sft"),
        ("format=sft&metadata=run", "metadata.0", "KEY=VALUE"),
        ("format=sft&min_score=7", "min_score", "1"),
        ("format=sft&strategy=a&strategy=b", "strategy", "once"),
        ("format=sft&colour=red", "colour", "known parameters"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name_with_what_would_be_right(
    client: httpx.AsyncClient, query: str, field: str, remedy: str
) -> None:
    response = await client.get(f"/v1/jobs/export?{query}")
    assert response.status_code == 422, response.text
    (error,) = response.json()["errors"]
    assert error["field"] == field
    assert remedy in error["message"]
