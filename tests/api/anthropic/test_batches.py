"""Batches of messages through Anthropic's own client: every request has one result, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import redis
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse

from api.batches import feeder as feeder_module
from api.batches import results as results_module
from tests.api.anthropic.client import MODEL, QUESTION, job_of
from tests.api.openai_client import listening, working
from workers.config.settings import Settings
from workers.store.files import FileStore
from workers.store.jobs import JobStore
from workers.store.keys import KeySpec, KeyStore

BODY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 300}


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(feeder_module, "POLL_SECONDS", 0.02)
    return settings.model_copy(update={"queue_cap": 40, "body_cap": 100_000})


@contextlib.asynccontextmanager
async def talking(settings: Settings) -> AsyncIterator[AsyncAnthropic]:
    """Yield the client of a service without a worker."""
    async with (
        listening(settings) as address,
        AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def client(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncAnthropic]:
    async with talking(settings) as client, working(url, store):
        yield client


def request(custom_id: str, **params: Any) -> Any:
    return {"custom_id": custom_id, "params": BODY | params}


async def ended(client: AsyncAnthropic, batch_id: str) -> MessageBatch:
    async with asyncio.timeout(90):
        while True:
            batch = await client.messages.batches.retrieve(batch_id)
            MessageBatch.model_validate(batch.model_dump())
            if batch.processing_status == "ended":
                return batch
            assert batch.results_url is None
            await asyncio.sleep(0.02)


async def results(client: AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    """Return the results by their ids, and check that there is one for each."""
    lines = [line async for line in await client.messages.batches.results(batch_id)]
    for line in lines:
        MessageBatchIndividualResponse.model_validate(line.model_dump())
    found = {line.custom_id: line.result for line in lines}
    assert len(found) == len(lines)
    return found


async def test_each_request_is_answered_as_a_message(client: AsyncAnthropic, store: JobStore) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    requests = [
        request("plain", seed=3, strategy={"name": "greedy"}),
        request("thinking", **thinking),
        request("system", system="Be short."),
        request("separators", messages=[{"role": "user", "content": "a\u2028b\x85c"}]),
    ]
    created = await client.messages.batches.create(requests=requests)
    assert (created.id.startswith("msgbatch_"), created.type, created.results_url) == (True, "message_batch", None)
    assert (created.expires_at - created.created_at).total_seconds() == pytest.approx(86_400, abs=1)
    batch = await ended(client, created.id)
    found = await results(client, batch.id)
    assert {name: result.type for name, result in found.items()} == dict.fromkeys(found, "succeeded"), found
    assert list(found) == [each["custom_id"] for each in requests]
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.canceled, counts.expired, counts.processing) == (4, 0, 0, 0, 0)
    assert batch.ended_at is not None
    direct = await client.messages.create(**BODY, extra_body={"seed": 3, "strategy": {"name": "greedy"}})
    assert found["plain"].message.content == direct.content
    assert found["thinking"].message.content[0].type == "thinking"
    job = await store.get(job_of(found["plain"].message.id))
    assert (job["spec"]["priority"], job["batch"]) == ("batch", batch.id.replace("msgbatch_", "batch_"))


async def test_a_request_that_is_refused_has_the_error_of_its_endpoint(client: AsyncAnthropic) -> None:
    requests = [
        request("good"),
        request("model", model="gpt"),
        request("tokens", max_tokens=0),
        request("image", messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        request("result", messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]),
        request("strategy", strategy={"name": "x"}),
    ]
    batch = await ended(client, (await client.messages.batches.create(requests=requests)).id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 5)
    found = await results(client, batch.id)
    errors = {name: result.error.error for name, result in found.items() if result.type == "errored"}
    assert errors["model"].type == "not_found_error"
    expected = {
        "tokens": "max_tokens: ",
        "image": "images are not supported",
        "result": "messages.0.content.0.tool_use_id: ",
        "strategy": "unknown strategy 'x'",
    }
    for name, hint in expected.items():
        assert (errors[name].type, hint in errors[name].message) == ("invalid_request_error", True), errors[name]


@pytest.mark.parametrize(
    ("requests", "hint"),
    [
        ([], "requests: "),
        ([request("a"), request("b"), request("a")], "requests 0 and 2 have the custom_id 'a'"),
        ([request("a b")], "requests.0.custom_id: "),
        ([request("a", stream=True)], "requests.0.params: a message of a batch is in its results"),
        ([request("a") | {"method": "POST"}], "known fields: custom_id, params"),
    ],
)
async def test_a_batch_that_is_wrong_as_a_whole_is_refused(
    client: AsyncAnthropic, store: JobStore, settings: Settings, requests: list[Any], hint: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as failure:
        await client.messages.batches.create(requests=requests)
    assert hint in failure.value.body["error"]["message"]  # type: ignore[index]
    assert [batch async for batch in client.messages.batches.list()] == []
    files = FileStore(store, settings.files_folder)
    assert await files.list_files(owner=None, purpose=None, after=None, limit=9, order="asc") == []


async def test_a_cancelled_batch_has_the_messages_until_then(
    settings: Settings, url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "PART_LINES", 3)
    async with talking(settings) as client:
        requests = [request("bad", max_tokens=0), *(request(str(n)) for n in range(40))]
        created = await client.messages.batches.create(requests=requests)
        own_path = "/v1/batches/" + created.id.replace("msgbatch_", "batch_")
        async with working(url, store), asyncio.timeout(60):
            num_completed = 0
            while num_completed < 5:
                own = await client.get(own_path, cast_to=dict[str, Any])
                num_completed = own["request_counts"]["completed"]
        with pytest.raises(anthropic.ConflictError, match="has not ended"):
            await client.get(f"/v1/messages/batches/{created.id}/results", cast_to=dict[str, Any])
        canceling = await client.messages.batches.cancel(created.id)
        assert canceling.cancel_initiated_at is not None
        async with working(url, store):
            batch = await ended(client, created.id)
        found = await results(client, batch.id)
        kinds = [result.type for result in found.values()]
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.expired) == (kinds.count("succeeded"), 1, 0)
        assert found["bad"].type == "errored"
        assert 0 < counts.canceled == kinds.count("canceled") == 40 - counts.succeeded


async def test_requests_that_have_not_ended_in_a_day_are_expired(settings: Settings, url: str, store: JobStore) -> None:
    async with talking(settings) as client:
        created = await client.messages.batches.create(requests=[request("1"), request("2")])
        with redis.Redis.from_url(url) as broker:
            broker.hset(f"reasoner:batch:{created.id.replace('msgbatch_', 'batch_')}", "expires", "1.0")
        batch = await ended(client, created.id)
        assert (batch.request_counts.expired, batch.request_counts.canceled) == (2, 0)
        assert {result.type for result in (await results(client, batch.id)).values()} == {"expired"}


async def test_the_list_has_batches_of_messages_alone_in_pages(
    client: AsyncAnthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.message_batches._SCAN", 2)
    ids = []
    for _ in range(3):
        ids.append((await client.messages.batches.create(requests=[request("1")])).id)
        body = {"jobs": [{"problem": "?"}], "budget": {"tokens": 50}}
        await client.post("/v1/batches", cast_to=dict[str, Any], body=body)
    first = await client.messages.batches.list(limit=2)
    assert ([batch.id for batch in first.data], first.has_more) == ([ids[2], ids[1]], True)
    assert [batch.id async for batch in client.messages.batches.list(limit=1)] == ids[::-1]
    assert [batch.id async for batch in client.beta.messages.batches.list()] == ids[::-1]
    with pytest.raises(anthropic.BadRequestError, match="before_id: unknown parameter"):
        await client.messages.batches.list(before_id=ids[0])
    with pytest.raises(anthropic.BadRequestError, match="there is no batch 'x'"):
        await client.messages.batches.list(after_id="x")


async def test_a_batch_is_seen_by_its_owner_alone_and_is_not_deleted(settings: Settings, store: JobStore) -> None:
    keys = [await KeyStore(store).create(KeySpec(name="k", owner=owner)) for owner in ("ann", "ben")]
    async with (
        listening(settings) as address,
        AsyncAnthropic(base_url=address, api_key=keys[0].key, max_retries=0) as ann,
        AsyncAnthropic(base_url=address, api_key=keys[1].key, max_retries=0) as ben,
    ):
        batch_id = (await ann.messages.batches.create(requests=[request("1")])).id
        assert [batch.id async for batch in ben.messages.batches.list()] == []
        for wrong in (batch_id, "msgbatch_x", batch_id.replace("msgbatch_", "batch_")):
            with pytest.raises(anthropic.NotFoundError, match="there is no batch"):
                await ben.messages.batches.retrieve(wrong)
        with pytest.raises(anthropic.APIStatusError, match="does not take DELETE: it takes GET"):
            await ann.messages.batches.delete(batch_id)


async def test_a_repeated_creation_with_its_key_is_one_batch_and_one_file(
    client: AsyncAnthropic, store: JobStore, settings: Settings
) -> None:
    made = [
        await client.messages.batches.create(requests=[request("1")], extra_headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert made[0].id == made[1].id
    files = FileStore(store, settings.files_folder)
    stored = await files.list_files(owner=None, purpose="batch", after=None, limit=9, order="asc")
    assert [file["filename"] for file in stored] == ["requests.jsonl"]
