"""The life of a job as a client observes it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.http.search_tree import build_tree
from engine.protocol.types import EngineClient, ModelInfo
from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.job import Job
from reasoner.jobs.journal import Entry, Journal, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.view import fold_events
from reasoner.run import JobOutcome, run_job
from tests.api.conftest import serving, submitted
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

Work = Callable[[str], Awaitable[None]]
BEAM = {"strategy": {"name": "beam", "n": 8, "expansions": 2, "max_steps": 3}, "seed": 5, "budget": {"tokens": 400}}


def parse_sse(text: str) -> list[dict[str, Any]]:
    """Parse an event stream, independently of the client, by the WHATWG specification."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            events.append({"id": int(fields["id"]), "event": fields["event"], **json.loads(fields["data"])})
    return events


async def read_events(client: httpx.AsyncClient, job_id: str, **request: Any) -> list[dict[str, Any]]:
    response = await client.get(f"/v1/jobs/{job_id}/events", **request)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_sse(response.text)


async def test_submission_returns_the_resolved_job(client: httpx.AsyncClient, settings: Settings) -> None:
    response = await client.post("/v1/jobs", json={"problem": "1 + 1?", "strategy": {"name": "beam"}})
    assert response.status_code == 202
    job = Job.model_validate(response.json())
    assert response.headers["location"] == f"/v1/jobs/{job.id}"
    assert job.status == "queued"
    assert (job.spec.budget.tokens, job.spec.budget.seconds) == (settings.budget_tokens, settings.budget_seconds)
    assert job.spec.seed is not None
    assert (job.spec.model, job.spec.verifier.model) == ("policy", "prm")
    assert job.spec.strategy.params["n"] > 0
    assert Job.model_validate((await client.get(response.headers["location"])).json()) == job


async def test_a_budget_in_the_request_is_kept(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", json={"problem": "?", "budget": {"tokens": 77}})
    others = {"thinking_tokens": None, "seconds": None, "flops": None, "cost": None, "effort": None}
    assert response.json()["spec"]["budget"] == {"tokens": 77} | others


async def test_a_finished_jobs_bill_is_the_sum_of_its_journal(
    client: httpx.AsyncClient, work: Work, store: JobStore
) -> None:
    job_id = await submitted(client, **BEAM)
    await work(job_id)
    job = Job.model_validate((await client.get(f"/v1/jobs/{job_id}")).json())
    assert job.status in ("completed", "incomplete")
    assert 0 < job.usage.total <= 400
    spent = sum((entry.spend for entry in await store.load_entries(job_id)), Usage())
    assert job.usage.model_dump() == pytest.approx(spent.model_dump())


async def test_submission_can_wait_for_the_end(client: httpx.AsyncClient, work: Work) -> None:
    async def work_on_the_next() -> None:
        jobs: list[dict[str, Any]] = []
        while not jobs:
            jobs = (await client.get("/v1/jobs", params={"status": "queued"})).json()["data"]
        await work(jobs[0]["id"])

    working = asyncio.create_task(work_on_the_next())
    response = await client.post(
        "/v1/jobs", json={"problem": "?", "seed": 1}, headers={"Prefer": "respond-async, wait=20"}
    )
    await working
    assert (response.status_code, response.headers["preference-applied"]) == (200, "wait=20")
    assert response.json()["finished_at"] is not None


async def test_waiting_for_a_job_that_does_not_end_times_out(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", json={"problem": "?"}, headers={"Prefer": "wait=0"})
    assert (response.status_code, response.json()["status"]) == (202, "queued")
    shown = await client.get(f"/v1/jobs/{response.json()['id']}", params={"wait": 0.05})
    assert shown.json()["status"] == "queued"


async def test_the_same_idempotency_key_returns_the_same_job(client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "abc", "Content-Type": "application/json"}
    first = await client.post("/v1/jobs", content='{"problem": "?", "seed": 3}', headers=headers)
    again = await client.post("/v1/jobs", content='{"seed":3,"problem":"\\u003f"}', headers=headers)
    other = await client.post("/v1/jobs", content='{"problem": "!"}', headers=headers)
    assert first.json() == again.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (other.status_code, other.json()["type"]) == (422, "urn:reasoner:problem:idempotency-conflict")


async def test_a_repeated_submission_is_answered_after_its_model_is_gone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(ScriptedEngine):
        names = ("policy", "brief")

        async def models(self) -> list[ModelInfo]:
            policy, *others = await super().models()
            return [*(replace(policy, id=name) for name in self.names), *others]

    monkeypatch.setattr("api.http.model_catalog.CACHE_SECONDS", 0.0)
    engine, spec = Changing(), {"problem": "?", "model": "brief"}
    jobs = {"jobs": [spec], "budget": {"tokens": 100}}
    async with serving(settings, engine) as client:

        async def submit(key: str) -> list[httpx.Response]:
            headers = {"Idempotency-Key": key}
            bodies = {"/v1/jobs": spec, "/v1/batches": jobs}
            return [await client.post(path, json=body, headers=headers) for path, body in bodies.items()]

        first = await submit("k")
        engine.names = ("policy",)
        assert [answer.status_code for answer in await submit("k")] == [202, 202]
        assert [answer.json()["id"] for answer in await submit("k")] == [answer.json()["id"] for answer in first]
        assert [answer.status_code for answer in await submit("other")] == [422, 404]  # as OpenAI's routes say it


async def test_events_resume_at_every_number_without_a_gap(client: httpx.AsyncClient, work: Work) -> None:
    job_id = await submitted(client, **BEAM)
    following = asyncio.create_task(read_events(client, job_id))
    await work(job_id)
    whole = await following
    last = (await client.get(f"/v1/jobs/{job_id}")).json()["last_seq"]
    assert [event["id"] for event in whole] == list(range(1, last + 1))
    assert [event["seq"] for event in whole] == [event["id"] for event in whole]
    assert all(event["event"] == event["type"] for event in whole)
    assert [event["type"] for event in whole].count("node") > 3
    assert [event["type"] for event in whole if event["type"].startswith("job.")] == [
        "job.queued",
        "job.started",
        whole[-1]["type"],
    ]
    for after in range(last):
        assert await read_events(client, job_id, params={"starting_after": after}) == whole[after:]
        assert await read_events(client, job_id, headers={"Last-Event-ID": str(after)}) == whole[after:]


async def test_model_text_cannot_break_the_stream(client: httpx.AsyncClient, store: JobStore) -> None:
    job_id = await submitted(client)
    held = await store.claim(job_id, lease=60, max_attempts=3, worker="w")
    assert held is not None
    text = "a\n\nid: 99\r\u2028\u2029\x85\x0b\x0c\x1c\0 \ud800 é 😀 data: x"
    await store.commit(held, [Entry("k", "node", {"text": text}, Usage(), 0.0)])
    await store.finish(held, "failed")
    lines = (await client.get(f"/v1/jobs/{job_id}/events")).text.splitlines()
    assert len([line for line in lines if line]) == 3 * 4  # event, data and id of each
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert data[2]["data"] == {"text": text}


async def test_a_reconnecting_browser_resumes_after_its_last_event(client: httpx.AsyncClient, work: Work) -> None:
    job_id = await submitted(client)
    await work(job_id)
    events = await read_events(client, job_id, params={"starting_after": 1}, headers={"Last-Event-ID": "3"})
    assert events[0]["id"] == 4


async def test_a_finished_stream_answers_204_so_that_browsers_do_not_reconnect(
    client: httpx.AsyncClient, work: Work
) -> None:
    job_id = await submitted(client)
    await work(job_id)
    last = (await client.get(f"/v1/jobs/{job_id}")).json()["last_seq"]
    response = await client.get(f"/v1/jobs/{job_id}/events", params={"starting_after": last})
    assert (response.status_code, response.content) == (204, b"")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"params": {"starting_after": 99}}, 400),
        ({"headers": {"Last-Event-ID": "99"}}, 400),
        ({"headers": {"Last-Event-ID": "x"}}, 400),
        ({"params": {"starting_after": -1}}, 422),
    ],
)
async def test_a_stream_cannot_start_after_an_event_that_does_not_exist(
    client: httpx.AsyncClient, request_: dict[str, Any], status: int
) -> None:
    job_id = await submitted(client)
    response = await client.get(f"/v1/jobs/{job_id}/events", **request_)
    assert response.status_code == status
    assert response.json()["errors"][0]["message"]


async def test_the_tree_agrees_with_the_journal(client: httpx.AsyncClient, work: Work, store: JobStore) -> None:
    job_id = await submitted(client, **BEAM)
    await work(job_id)
    tree = (await client.get(f"/v1/jobs/{job_id}/tree")).json()
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert tree == build_tree(job_id, fold_events(await store.load_events(job_id))).model_dump(mode="json")
    nodes = {node["id"]: node for node in tree["nodes"]}
    assert sum(node["tokens"] for node in nodes.values()) == job["usage"]["generated"]
    assert all(node["parent"] == "" or node["parent"] in nodes for node in nodes.values())
    assert tree["best"] == job["result"]["node"]
    assert {node["state"] for node in nodes.values()} >= {"pruned"}
    assert any(node["score"] is not None and node["scores"] for node in nodes.values())


async def test_the_spend_of_all_events_adds_up_to_the_bill(
    client: httpx.AsyncClient, work: Work, store: JobStore
) -> None:
    job_id = await submitted(client, **BEAM)
    await work(job_id)
    total = Usage()
    for event in await store.load_events(job_id):
        assert all(event.spend.values())
        total += Usage.model_validate(event.spend)
    assert total.generated > 0
    assert total.model_dump() == pytest.approx((await client.get(f"/v1/jobs/{job_id}")).json()["usage"])


def test_a_branch_that_arrives_in_segments_is_one_node() -> None:
    def event(seq: int, kind: str, **data: Any) -> Event:
        return Event(seq=seq, type=kind, at=0.0, data=data)

    part = {"node": "0", "parent": "", "token_ids": [], "cached": 0, "answer": None}
    events = [
        event(1, "job.started"),
        event(2, "node", **part, text="a", tokens=1, logprob=-1.0, part=0, final=False, reason=None),
        event(3, "node", **part, text="b", tokens=2, logprob=-0.5, part=1, final=True, reason="step"),
        event(4, "score", node="0", scores=[0.5], score=0.5, computed=3, cached=0),
        event(5, "score", node="0", scores=[0.25], score=0.25, computed=3, cached=0),
    ]
    growing, whole = (build_tree("j", fold_events(told)).nodes[0] for told in (events[:2], events))
    assert (growing.state, growing.text) == ("live", "a")
    assert (whole.state, whole.reason, whole.text, whole.tokens, whole.logprob) == ("step", "step", "ab", 3, -1.5)
    assert (whole.scores, whole.score) == ([0.5, 0.25], 0.25)


async def test_cancelling_a_waiting_job_ends_it(client: httpx.AsyncClient) -> None:
    job_id = await submitted(client)
    response = await client.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "cancelled")
    assert (await client.post(f"/v1/jobs/{job_id}/cancel")).json() == response.json()


async def test_a_job_cancelled_while_running_has_its_best_result_so_far(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        class Telling(MemoryJournal):
            """Cancels the job when a branch has an answer; the search stops at its next append."""

            async def load(self) -> list[Entry]:
                return await journal.load()

            async def append(self, entries: Sequence[Entry]) -> None:
                await journal.append(entries)
                if any(entry.data.get("answer") is not None for entry in entries):
                    assert (await client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202

        return await run_job(spec, engine, Telling(), cancelled=cancelled)

    job_id = await submitted(client, strategy={"name": "best_of_n", "n": 8}, seed=5)
    await execute(
        job_id,
        store=store,
        engine=ScriptedEngine(),
        run=run,
        shutting_down=asyncio.Event(),
        leases=Leases(store, 30),
        claims=ClaimQueue(store, lease=30, max_attempts=3),
    )
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert (job["status"], job["result"]["finish_reason"]) == ("cancelled", "cancelled")
    told = [event["data"] for event in await read_events(client, job_id) if event["event"] == "node"]
    assert job["result"]["answer"] in {node["answer"] for node in told} - {None}
    assert f"boxed{{{job['result']['answer']}}}" in job["result"]["text"]


async def test_a_job_out_of_budget_before_any_branch_ended_shows_its_best_partial_branch(
    client: httpx.AsyncClient, work: Work
) -> None:
    for budget in ({"tokens": 4}, {"seconds": 1e-6}):
        job_id = await submitted(client, strategy={"name": "beam", "n": 8}, seed=1, budget=budget)
        await work(job_id)
        job = (await client.get(f"/v1/jobs/{job_id}")).json()
        assert (job["status"], job["result"]["finish_reason"]) == ("incomplete", "budget")
        assert job["result"]["answer"] is None
        assert bool(job["result"]["text"]) == (job["usage"]["generated"] > 0)


async def test_a_running_job_cannot_be_deleted_and_an_ended_one_can(client: httpx.AsyncClient, store: JobStore) -> None:
    job_id = await submitted(client)
    held = await store.claim(job_id, lease=60, max_attempts=3, worker="w")
    assert held is not None
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 409
    assert (await client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202
    await store.finish(held, "cancelled")
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await client.get(f"/v1/jobs/{job_id}")).status_code == 404


async def test_listing_pages_through_all_jobs(client: httpx.AsyncClient) -> None:
    ids = [await submitted(client) for _ in range(5)]
    first = (await client.get("/v1/jobs", params={"limit": 3})).json()
    second = (await client.get("/v1/jobs", params={"limit": 3, "after": first["last_id"]})).json()
    assert [job["id"] for job in first["data"] + second["data"]] == ids[::-1]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert (await client.get("/v1/jobs", params={"status": "completed"})).json()["data"] == []


async def test_a_deadline_is_echoed_and_one_in_the_past_is_refused(client: httpx.AsyncClient) -> None:
    deadline = time.time() + 60
    job = (await client.post("/v1/jobs", json={"problem": "?", "deadline": deadline})).json()
    assert job["spec"]["deadline"] == deadline
    assert "deadline" not in (await client.post("/v1/jobs", json={"problem": "?"})).json()["spec"]
    for past, hint in ((deadline - 120, "give a later time"), (deadline * 1000, "less than or equal to")):
        response = await client.post("/v1/jobs", json={"problem": "?", "deadline": past})
        assert response.status_code == 422
        (error,) = response.json()["errors"]
        assert error["field"] == "deadline"
        assert hint in error["message"]


async def test_an_effort_is_echoed_as_its_budget_and_strategy(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", json={"problem": "?", "budget": {"effort": "medium"}})
    spec = response.json()["spec"]
    assert (spec["budget"]["effort"], spec["budget"]["tokens"], spec["budget"]["seconds"]) == ("medium", 20_000, None)
    assert (spec["strategy"]["name"], spec["strategy"]["n"]) == ("weighted_vote", 16)
    again = await client.post("/v1/jobs", json=spec)  # an echoed spec can be submitted again
    assert again.json()["spec"] == spec


def test_the_tree_of_a_cancelled_job_shows_the_best_so_far() -> None:
    node = {"node": "0", "parent": "", "text": "so", "tokens": 1, "logprob": -1.0, "final": True}
    grown = Event(seq=1, type="node", at=0.0, data=node | {"reason": "stop", "answer": "2"})
    for result, best in ((None, None), ({"node": "0"}, "0")):
        end = Event(seq=2, type="job.cancelled", at=1.0, data={"result": result, "error": None, "usage": {}})
        assert build_tree("job", fold_events([grown, end])).best == best
