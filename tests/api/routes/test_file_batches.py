"""Batches of files with OpenAI's own client: every line has one result, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from anthropic.types import Message
from openai import AsyncOpenAI
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from api.batches import feeder as feeder_module
from api.batches import results as results_module
from api.http import submission as submission_module
from engine.protocol.types import ModelInfo, SomeModelsAway
from reasoner.jobs.batch import Batch as OwnBatch
from reasoner.jobs.job import Job
from tests.api.conftest import serving
from tests.api.openai_client import MODEL, QUESTION, listening, working
from tests.scripted import ScriptedEngine
from workers.archive.filters import JobFilter
from workers.config.settings import Settings
from workers.store.file_batches import FileBatch, FileBatchStore, NewFileBatch
from workers.store.files import FileStore, NoSuchFile, StoredFile
from workers.store.jobs import JobStore
from workers.store.keys import KeySpec, KeyStore

CHAT, RESPONSES, JOBS = "/v1/chat/completions", "/v1/responses", "/v1/jobs"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": QUESTION},
    RESPONSES: {"model": MODEL, "input": "1 + 1?"},
    MESSAGES: {"model": MODEL, "messages": QUESTION, "max_tokens": 300},
    JOBS: {"problem": "1 + 1?", "strategy": {"name": "greedy"}},
}
TYPES: dict[str, Any] = {CHAT: ChatCompletion, RESPONSES: Response, MESSAGES: Message, JOBS: Job}


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(feeder_module, "POLL_SECONDS", 0.02)
    return settings.model_copy(update={"queue_cap": 40, "body_cap": 100_000})


@pytest.fixture
async def ai(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncOpenAI]:
    async with (
        listening(settings) as address,
        working(url, store),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def line(custom_id: Any, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": BODIES[endpoint] | body}


async def upload(ai: AsyncOpenAI, lines: list[Any]) -> str:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return (await ai.files.create(file=("lines.jsonl", text.encode()), purpose="batch")).id


async def submit(ai: AsyncOpenAI, lines: list[Any], endpoint: str = CHAT, **more: Any) -> Batch:
    created: Batch = await ai.batches.create(
        input_file_id=await upload(ai, lines),
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        **more,
    )
    return created


async def until(ai: AsyncOpenAI, batch_id: str, is_done: Callable[[Batch], bool]) -> Batch:
    async with asyncio.timeout(90):
        while True:
            batch = await ai.batches.retrieve(batch_id)
            if is_done(batch):
                OwnBatch.model_validate_json(batch.model_dump_json())
                return batch
            await asyncio.sleep(0.02)


async def ended(ai: AsyncOpenAI, batch_id: str) -> Batch:
    return await until(ai, batch_id, lambda batch: batch.status in ("completed", "failed", "expired", "cancelled"))


async def results(ai: AsyncOpenAI, file_id: str | None) -> dict[str | None, dict[str, Any]]:
    """Return the lines of a file of results by their ids, and check that there is one line for each."""
    if file_id is None:
        return {}
    FileObject.model_validate((await ai.files.retrieve(file_id)).model_dump())
    lines = [json.loads(each) for each in (await ai.files.content(file_id)).text.splitlines()]
    assert all(each["id"].startswith("batch_req_") for each in lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES, JOBS])
async def test_each_line_is_answered_in_its_order_as_its_endpoint_answers(
    ai: AsyncOpenAI, store: JobStore, endpoint: str
) -> None:
    batch = await submit(ai, [line(f"line-{n}", endpoint, seed=n) for n in range(7)], endpoint, metadata={"a": "b"})
    assert (batch.status, batch.endpoint, batch.completion_window) == ("validating", endpoint, "24h")
    done = await ended(ai, batch.id)
    counts = done.request_counts
    assert counts is not None
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 7, 7, 0)
    assert (done.error_file_id, done.metadata) == (None, {"a": "b"})
    answers = await results(ai, done.output_file_id)
    assert list(answers) == [f"line-{n}" for n in range(7)]
    total = 0
    for custom_id, answer in answers.items():
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200), custom_id
        body = answer["response"]["body"]
        TYPES[endpoint].model_validate(body)
        job_id = body["id"] if endpoint == JOBS else body["reasoner"]["job"]
        job = await store.get(job_id)
        assert (job["batch"], job["spec"]["priority"]) == (batch.id, "batch")
        total += job["usage"]["generated"] + job["usage"]["verifier_computed"]
        if endpoint == JOBS:
            assert body == job
    assert done.usage is not None
    assert done.usage.output_tokens == total > 0
    assert done.output_file_id is not None
    output = await ai.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    deleted = await ai.files.delete(done.input_file_id)
    assert deleted.deleted


async def test_an_answer_in_a_batch_is_the_one_that_the_endpoint_gives(ai: AsyncOpenAI) -> None:
    body = {"seed": 3, "strategy": {"name": "greedy"}}
    direct = await ai.post("/chat/completions", cast_to=httpx.Response, body=BODIES[CHAT] | body)
    done = await ended(ai, (await submit(ai, [line("1", **body)])).id)
    answer = (await results(ai, done.output_file_id))["1"]["response"]["body"]
    same = direct.json() | {name: answer[name] for name in ("id", "created")}
    same["reasoner"] |= {name: answer["reasoner"][name] for name in ("job", "usage")}  # its seconds differ
    assert answer == same


BAD = [
    ('{"custom_id": "a", ', None, "invalid_json", "not a valid JSON document"),
    ("[1]", None, "invalid_json", "no JSON object with the fields custom_id, method, url, body"),
    ("\u2028", None, "invalid_json", "not a valid"),
    ({"method": "POST", "url": CHAT, "body": {}}, None, "invalid_custom_id", "1 to 512 characters"),
    (line(7), None, "invalid_custom_id", "custom_id: give a text"),
    (line("same"), "same", "duplicate_custom_id", "line 2 has it, too"),
    (line("get") | {"method": "GET"}, "get", "invalid_method", "it must be 'POST'"),
    (line("url", RESPONSES), "url", "invalid_url", f"it must be '{CHAT}'"),
    (line("none") | {"body": None}, "none", "invalid_body", "it must be a JSON object"),
    (line("stream", stream=True), "stream", "invalid_body", "not as a stream: leave it out"),
    (line("field") | {"priority": 1}, "field", "unknown_field", "known fields: custom_id"),
    (line("long", user="x" * 100_000), None, "line_too_long", "longer than a request may be"),
]
REFUSED = [
    (line("budget", budget={"token": 1}), 400, "budget.token", "known fields: tokens"),
    (line("strategy", strategy={"name": "x"}), 400, "strategy", "unknown strategy 'x'"),
    (line("model", model="gpt"), 404, "model", "served are policy"),
    (line("messages", messages=[]), 400, "messages", "at least 1"),
    (line("image", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, None, "images"),
]


async def test_a_bad_line_is_an_error_with_its_number_and_the_others_run(ai: AsyncOpenAI) -> None:
    lines: list[Any] = ["", line("same"), *(bad for bad, *_ in BAD), "  ", *(bad for bad, *_ in REFUSED), line("last")]
    done = await ended(ai, (await submit(ai, lines)).id)
    counts = done.request_counts
    assert counts is not None
    num_bad = len(BAD) + len(REFUSED)
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", num_bad + 2, 2, num_bad)
    assert list(await results(ai, done.output_file_id)) == ["same", "last"]
    assert done.error_file_id is not None
    errors = [json.loads(each) for each in (await ai.files.content(done.error_file_id)).text.splitlines()]
    assert [error["line"] for error in errors] == [*range(3, 3 + len(BAD)), *range(4 + len(BAD), 4 + num_bad)]
    for (_, custom_id, code, hint), error in zip(BAD, errors, strict=False):
        assert (error["custom_id"], error["response"], error["error"]["code"]) == (custom_id, None, code), error
        assert f"line {error['line']}: " in error["error"]["message"]
        assert hint in error["error"]["message"], error
    for (sent, status, param, hint), error in zip(REFUSED, errors[len(BAD) :], strict=True):
        response = error["response"]
        assert (error["custom_id"], error["error"], response["status_code"]) == (sent["custom_id"], None, status), error
        assert response["request_id"].startswith("req_")
        assert param is None or response["body"]["error"]["param"] == param
        assert hint in response["body"]["error"]["message"]


async def test_refusals_of_jobs_are_problem_documents(ai: AsyncOpenAI) -> None:
    lines = [line("1", JOBS, budget={"cost": 1}), line("2", JOBS)]
    done = await ended(ai, (await submit(ai, lines, JOBS)).id)
    response = (await results(ai, done.error_file_id))["1"]["response"]
    assert (response["status_code"], response["body"]["status"]) == (422, 422)
    assert "has no prices" in response["body"]["detail"]
    assert response["body"]["request_id"] == response["request_id"]


async def test_a_key_that_is_limited_to_models_is_so_in_its_batches(
    settings: Settings, url: str, store: JobStore
) -> None:
    key = await KeyStore(store).create(KeySpec(name="k", owner="ann", models=["qwen"]))
    async with (
        listening(settings) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key=key.key, max_retries=0) as ai,
    ):
        done = await ended(ai, (await submit(ai, [line("1")])).id)
        response = (await results(ai, done.error_file_id))["1"]["response"]
        assert (response["status_code"], response["body"]["error"]["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize(
    ("lines", "more", "code", "hint"),
    [
        ([], {}, "empty_file", "write one request a line"),
        (["", "  "], {}, "empty_file", "write one request a line"),
        (["x", line("1", RESPONSES)], {}, "invalid_json", "not a valid JSON document"),
        (
            [line("1"), line("2")],
            {"extra_body": {"budget": {"tokens": 1}}},
            "budget_too_small",
            "1 tokens are too few for 2 lines",
        ),
    ],
)
async def test_a_file_of_which_nothing_can_run_fails_with_the_reasons(
    ai: AsyncOpenAI, lines: list[Any], more: dict[str, Any], code: str, hint: str
) -> None:
    done = await ended(ai, (await submit(ai, lines, **more)).id)
    assert (done.status, done.output_file_id, done.failed_at is not None) == ("failed", None, True)
    assert done.errors is not None
    assert done.errors.data
    assert (done.errors.data[0].code, hint in (done.errors.data[0].message or "")) == (code, True), done.errors
    assert [error.line for error in done.errors.data] in ([None], [1, 2])
    await ai.files.delete(done.input_file_id)


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"budget_tokens": "2000", "strategy": '{"name": "weighted_vote", "n": 6}'}},
        {"extra_body": {"budget": {"tokens": 2000}, "strategy": {"name": "weighted_vote", "n": 6}}},
    ],
    ids=["metadata", "extra_body"],
)
async def test_lines_share_one_budget_and_one_strategy(ai: AsyncOpenAI, store: JobStore, more: dict[str, Any]) -> None:
    lines = [line(str(n), JOBS, seed=n) for n in range(50)]
    for each in lines[1:]:
        del each["body"]["strategy"]
    done = await ended(ai, (await submit(ai, lines, JOBS, **more)).id)
    assert done.status == "completed"
    answers = await results(ai, done.output_file_id)
    assert len(answers) == 50
    jobs = [Job.model_validate(answer["response"]["body"]) for answer in answers.values()]
    assert [job.spec.strategy.name for job in jobs] == ["greedy", *["weighted_vote"] * 49]
    spent = sum(job.usage.total for job in jobs)
    own = OwnBatch.model_validate(done.model_dump())
    assert own.unassigned is not None
    assert 0 < spent == 2000 - own.unassigned <= 2000
    assert own.usage.total == spent
    granted = {
        job.id: sum(e.data["tokens"] for e in await store.load_events(job.id) if e.type == "grant") for job in jobs
    }
    assert max(granted.values()) > 2000 // 50  # one line's share alone is less


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", f"give {CHAT}, {RESPONSES}, {MESSAGES}, {JOBS}"),
        ({"completion_window": "soon"}, "completion_window", "such as '24h'"),
        ({"completion_window": "31d"}, "completion_window", "up to 30 days"),
        ({"completion_window": "0h"}, "completion_window", "such as '24h'"),
        ({"budget": {"tokens": 0}}, "budget.tokens", "greater than or equal to 1"),
        ({"metadata": {"budget_tokens": "0"}}, "body", "metadata.budget_tokens: give a number of tokens from 1"),
        ({"metadata": {"budget_tokens": "many"}}, "body", "not 'many'"),
        ({"metadata": {"strategy": "{"}}, "body", "metadata.strategy: give the name"),
        ({"metadata": {"strategy": "x"}}, "strategy", "unknown strategy 'x'"),
        ({"metadata": {"strategy": "greedy"}, "strategy": {"name": "greedy"}}, "body", "not both"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds", "3600"),
        ({"budgets": 1}, "budgets", "known fields: input_file_id, endpoint"),
        ({"input_file_id": "user"}, "input_file_id", "upload it with the purpose 'batch'"),
    ],
)
async def test_an_invalid_batch_is_refused_with_what_would_be_right(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, hint: str
) -> None:
    ids = {}
    for purpose in ("batch", "user_data"):
        parts = {"purpose": (None, purpose), "file": ("f", b"{}")}
        ids[purpose] = (await client.post("/v1/files", files=parts)).json()["id"]
    whole = {"input_file_id": ids["batch"], "endpoint": CHAT, "completion_window": "24h"} | body
    if whole["input_file_id"] == "user":
        whole["input_file_id"] = ids["user_data"]
    response = await client.post("/v1/batches", json=whole)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert hint in error["message"], error
    assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_batch_of_an_unknown_file_is_not_found(ai: AsyncOpenAI) -> None:
    for file_id in ("file-" + "0" * 32, "x"):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await ai.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


async def test_a_cancelled_batch_has_the_answers_until_then_and_an_error_for_each_other_line(
    settings: Settings, url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "PART_LINES", 3)
    async with (
        listening(settings) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as ai,
    ):
        batch = await submit(ai, [*(line(str(n)) for n in range(60)), line("bad", n=0)])
        async with working(url, store):
            await until(
                ai, batch.id, lambda each: each.request_counts is not None and each.request_counts.completed > 4
            )
        cancelling = await ai.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        with pytest.raises(openai.ConflictError, match="an unfinished batch reads the file"):
            await ai.files.delete(batch.input_file_id)
        async with working(url, store):
            done = await ended(ai, batch.id)
        counts = done.request_counts
        assert counts is not None
        assert (done.status, counts.total, done.cancelled_at is not None) == ("cancelled", 61, True)
        answers, errors = await results(ai, done.output_file_id), await results(ai, done.error_file_id)
        assert (len(answers), len(errors)) == (counts.completed, counts.failed)
        assert 4 < len(answers) < 61
        assert answers.keys() | errors.keys() == {*map(str, range(60)), "bad"}
        assert {error["error"]["code"] for error in errors.values() if error["error"]} == {"batch_cancelled"}
        assert (await ai.batches.cancel(batch.id)).status == "cancelled"
        await ai.files.delete(batch.input_file_id)


async def test_lines_that_have_not_ended_at_the_end_of_the_window_are_errors(
    settings: Settings, url: str, store: JobStore
) -> None:
    async with (
        listening(settings) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as ai,
    ):
        batch = await submit(ai, [line(str(n)) for n in range(30)])
        assert batch.expires_at == pytest.approx(batch.created_at + 86_400, abs=1)
        await until(ai, batch.id, lambda each: each.status == "in_progress")
        with redis.Redis.from_url(url) as client:
            client.hset(f"reasoner:batch:{batch.id}", "expires", "1.0")
        done = await ended(ai, batch.id)
        assert (done.status, done.expired_at is not None, done.output_file_id) == ("expired", True, None)
        errors = await results(ai, done.error_file_id)
        assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}
        assert len(errors) == 30
        counts = (await store.get_stats())[0]
        assert (counts["queued"], counts["in_progress"]) == (0, 0)


async def test_a_batch_whose_file_is_lost_while_it_runs_fails_and_does_not_stay_open(settings: Settings) -> None:
    """As in a container that is made anew without the volume of its files."""
    async with listening(settings) as address, AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as ai:
        batch = await submit(ai, [line(str(number), JOBS) for number in range(3)], JOBS)
        await until(ai, batch.id, lambda batch: batch.status == "in_progress")
        [path] = [path for path in settings.data_dir.rglob(f"*{batch.input_file_id}*") if path.is_file()]
        path.unlink()
        await ai.batches.cancel(batch.id)
        failed = await ended(ai, batch.id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or ()] == ["file_missing"]


async def test_few_jobs_of_a_long_file_wait_at_a_time_and_no_process_is_needed_to_the_end(
    settings: Settings, url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that end at any step, while they hold a batch or not, lose no line and submit none twice."""
    monkeypatch.setattr(feeder_module, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(feeder_module, "MAX_JOBS_IN_FLIGHT", 8)
    monkeypatch.setattr(results_module, "PART_LINES", 5)
    num_lines, highest, batch_id = 80, 0, ""
    async with working(url, store):
        for number in range(200):
            async with listening(settings) as address, contextlib.AsyncExitStack() as stack:
                ai = await stack.enter_async_context(AsyncOpenAI(base_url=f"{address}/v1", api_key="none"))
                if not number:
                    batch_id = (await submit(ai, [line(str(n), JOBS) for n in range(num_lines)], JOBS)).id
                for _ in range(5):
                    counts = (await store.get_stats())[0]
                    highest = max(highest, counts["queued"] + counts["in_progress"])
                    await asyncio.sleep(0.01)
                batch = await ai.batches.retrieve(batch_id)
                if batch.status == "completed":
                    answers = await results(ai, batch.output_file_id)
                    break
        else:
            pytest.fail("the batch does not end")
    assert list(answers) == [str(n) for n in range(num_lines)]
    assert 0 < highest <= 8
    assert len((await store.list_jobs(owner=None, after=None, limit=1000)).jobs) == num_lines


async def test_lists_have_both_kinds_and_pages_that_openais_client_follows(ai: AsyncOpenAI) -> None:
    ids = [(await submit(ai, [line("1")])).id for _ in range(2)]
    body = {"jobs": [{"problem": "?"}], "budget": {"tokens": 50}}
    given = await ai.post("/batches", cast_to=Batch, body=body)
    Batch.model_validate(given.model_dump())
    assert [batch.id async for batch in ai.batches.list(limit=1)] == [given.id, *ids[::-1]]
    async for batch in ai.batches.list():
        Batch.model_validate(batch.model_dump())
    with pytest.raises(openai.BadRequestError, match="there is no batch 'x'"):
        await ai.batches.list(after="x")


async def test_a_repeated_submission_with_its_key_is_one_batch(ai: AsyncOpenAI) -> None:
    file_id = await upload(ai, [line("1")])
    made = [
        await ai.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", extra_headers={"Idempotency-Key": "k"}
        )
        for _ in range(2)
    ]
    assert made[0].id == made[1].id


async def test_a_line_whose_job_was_deleted_is_an_error_and_a_failed_one_cannot_be_retried(
    settings: Settings, store: JobStore
) -> None:
    async with serving(settings, ScriptedEngine()) as client:
        text = "\n".join(json.dumps(line(str(n), JOBS)) for n in range(3))
        file = await client.post("/v1/files", files={"purpose": (None, "batch"), "file": ("f", text.encode())})
        spec = {"input_file_id": file.json()["id"], "endpoint": JOBS, "completion_window": "24h"}
        batch_id = (await client.post("/v1/batches", json=spec)).json()["id"]
        async with asyncio.timeout(30):
            jobs: list[dict[str, Any]] = []
            while len(jobs) < 3:
                await asyncio.sleep(0.02)
                jobs = (await store.list_jobs(owner=None, after=None, limit=9)).jobs
            held = await store.claim(jobs[0]["id"], lease=60, max_attempts=3, worker="w")
            assert held is not None
            await store.finish(held, "failed")
            retried = await client.post(f"/v1/jobs/{jobs[0]['id']}/retry")
            assert (retried.status_code, "line of a batch's file" in retried.json()["detail"]) == (409, True)
            await store.cancel(jobs[1]["id"])
            assert (await client.delete(f"/v1/jobs/{jobs[1]['id']}")).status_code == 204
            await store.cancel(jobs[2]["id"])
            batch: dict[str, Any] = {}
            while batch.get("status") != "completed":
                await asyncio.sleep(0.02)
                batch = (await client.get(f"/v1/batches/{batch_id}")).json()
        assert (batch["request_counts"], batch["output_file_id"]) == ({"total": 3, "completed": 0, "failed": 3}, None)
        content = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text
        errors = {each["custom_id"]: each for each in map(json.loads, content.splitlines())}
        assert errors["1"]["error"]["code"] == "deleted"
        assert [errors[n]["response"]["body"]["status"] for n in ("0", "2")] == ["cancelled", "failed"]


@pytest.mark.parametrize("reason", ["queue", "jobs", "tokens"])
async def test_lines_for_which_there_is_no_room_are_not_read_again_and_again(
    settings: Settings, store: JobStore, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Two jobs have room, by the queue, the owner's jobs or the owner's tokens, and nobody works on them.

    In the queue they are others' jobs, so that no line has room.
    """
    limits: dict[str, Any] = {"queue": {}, "jobs": {"jobs": 2}, "tokens": {"tokens_a_day": 2500}}[reason]
    changes = {"limits": settings.limits.model_copy(update=limits)} | ({"queue_cap": 4} if reason == "queue" else {})
    num_resolved, rounds, many_rounds = 0, 0, asyncio.Event()
    accept, look = submission_module.accept_job, FileBatchStore.find_open

    async def counting_accept(*arguments: Any, **options: Any) -> dict[str, Any]:
        nonlocal num_resolved
        num_resolved += 1
        return await accept(*arguments, **options)

    async def counting_look(self: FileBatchStore, batch: FileBatch) -> dict[str, int]:
        nonlocal rounds
        opened = await look(self, batch)
        rounds += len(opened) == (0 if reason == "queue" else 2)
        if rounds == 20:
            many_rounds.set()
        return opened

    monkeypatch.setattr(feeder_module, "accept_job", counting_accept)
    monkeypatch.setattr(FileBatchStore, "find_open", counting_look)
    async with (
        listening(settings.model_copy(update=changes)) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as ai,
    ):
        for _ in range(2 if reason == "queue" else 0):
            await ai.post("/jobs", cast_to=httpx.Response, body=BODIES[JOBS])
        lines = [line(str(n), JOBS, budget={"tokens": 1000}) for n in range(60)]
        await submit(ai, lines, JOBS)
        async with asyncio.timeout(60):
            await many_rounds.wait()
        assert (await store.get_stats())[0]["queued"] == 2
    # What a job reserves is known when it is resolved.
    assert num_resolved <= {"queue": 0, "jobs": 2, "tokens": 3 + rounds}[reason]


async def test_unfinished_batches_are_limited_for_each_owner_alone(
    settings: Settings, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.store.file_batches.MAX_OPEN_BATCHES", 1)
    keys = [await KeyStore(store).create(KeySpec(name="k", owner=owner)) for owner in ("ann", "bob")]
    async with listening(settings) as address:
        clients = [AsyncOpenAI(base_url=f"{address}/v1", api_key=key.key, max_retries=0) for key in keys]
        first = await submit(clients[0], [line("1")])
        with pytest.raises(openai.RateLimitError, match="1 of your batches are unfinished, and that is the limit"):
            await submit(clients[0], [line("1")])
        assert (await submit(clients[1], [line("1")])).id != first.id
        await clients[0].batches.cancel(first.id)
        await ended(clients[0], first.id)
        await submit(clients[0], [line("1")])
        for client in clients:
            await client.close()


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_batch_ends_with_the_validity_of_its_key(
    settings: Settings, url: str, store: JobStore, how: str
) -> None:
    """As its open requests do: its jobs are cancelled, and each other line is an error that says why."""
    keys = KeyStore(store)
    key, other = [await keys.create(KeySpec(name="k", owner="ann")) for _ in range(2)]
    async with (
        listening(settings) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key=key.key, max_retries=0) as ai,
        AsyncOpenAI(base_url=f"{address}/v1", api_key=other.key, max_retries=0) as watching,
    ):
        batch = await submit(ai, [line(str(n), JOBS) for n in range(60)], JOBS)
        await until(ai, batch.id, lambda each: each.status == "in_progress")
        if how == "revoked":
            await keys.revoke(key.id)
        else:
            with redis.Redis.from_url(url) as client:
                client.hset(f"reasoner:key:{key.id}", "expires", "1.0")
        done = await ended(watching, batch.id)
        assert (done.status, done.cancelling_at is not None, done.output_file_id) == ("cancelled", True, None)
        errors = await results(watching, done.error_file_id)
    assert {error["error"]["code"] for error in errors.values()} == {"key_revoked"}
    assert len(errors) == 60
    counts = (await store.get_stats())[0]
    assert (counts["queued"], counts["in_progress"]) == (0, 0)


async def test_a_line_for_a_model_that_is_away_waits_as_any_job(settings: Settings, store: JobStore) -> None:
    class PartlyAway(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            here, *_ = await super().models()
            raise SomeModelsAway("http://b is restarting", [here], [replace(here, id="far")])

    async with (
        listening(settings, PartlyAway()) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as ai,
    ):
        batch = await submit(ai, [line("1", JOBS, model="far"), line("2", JOBS)], JOBS)
        async with asyncio.timeout(60):
            jobs: list[dict[str, Any]] = []
            while len(jobs) < 2:
                jobs = (await store.list_jobs(JobFilter("queued"), owner=None, after=None, limit=9)).jobs
                await asyncio.sleep(0.02)
        assert {job["spec"]["model"] for job in jobs} == {"far", MODEL}
        assert {job["batch"] for job in jobs} == {batch.id}


async def test_a_repeated_submission_is_answered_after_its_file_is_gone(ai: AsyncOpenAI) -> None:
    file_id = await upload(ai, [line("1", JOBS)])
    given: Any = {"endpoint": JOBS, "completion_window": "24h", "extra_headers": {"Idempotency-Key": "k"}}
    first = await ai.batches.create(input_file_id=file_id, **given)
    await ended(ai, first.id)
    await ai.files.delete(file_id)
    assert (await ai.batches.create(input_file_id=file_id, **given)).id == first.id
    with pytest.raises(openai.BadRequestError, match="with another body"):
        await ai.batches.create(input_file_id=await upload(ai, [line("2", JOBS)]), **given)


async def test_a_file_whose_time_is_over_is_gone_for_a_batch_that_begins(store: JobStore, tmp_path: Path) -> None:
    """One step decides: there is no moment in which a batch takes a file whose bytes are being removed."""
    files, batches = FileStore(store, tmp_path), FileBatchStore(store)
    new = {"endpoint": JOBS, "completion_window": "24h", "window_seconds": 60.0, "metadata": {}, "budget": None}
    for name in ("read", "due"):
        (tmp_path / f"file-{name}").write_bytes(b"x")
        stored = {"owner": "ann", "filename": name, "purpose": "batch", "num_bytes": 1, "keep_seconds": 0.0}
        await files.record(StoredFile(id=f"file-{name}", **stored), 100)  # type: ignore[arg-type]

    async def begin(name: str) -> None:
        batch = NewFileBatch(input_file_id=f"file-{name}", line_defaults={}, output_seconds=60.0, **new)  # type: ignore[arg-type]
        await batches.submit(batch, owner="ann", key_id="k")

    await begin("read")
    assert await store.script("file_expired", 9) == ["file-due"]
    with pytest.raises(NoSuchFile):
        await begin("due")
    assert (await files.get("file-read"))["bytes"] == 1
    assert int(await store.command("HGET", "reasoner:files:bytes", "ann")) == 1


def test_two_processes_that_write_one_file_leave_one_of_both(tmp_path: Path) -> None:
    """Also with the same process id, as in two containers."""
    path = tmp_path / "0.output"
    with results_module._ReplacedFile(path) as first, results_module._ReplacedFile(path) as second:
        for number in range(3):
            first.file.write(b"a%d" % number)
            second.file.write(b"b%d" % number)
    assert path.read_bytes() == b"a0a1a2"  # which was replaced last
    assert list(tmp_path.iterdir()) == [path]
