"""Responses through OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from reasoner.budget.usage import Usage
from tests.api.openai_client import MODEL, address, ai, http, job_of, listening, worker, working
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["address", "ai", "http", "worker"]

BEAM: dict[str, Any] = {"strategy": {"name": "beam", "n": 8, "expansions": 2, "max_steps": 3}, "seed": 5}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "1 + 1?",
    "instructions": "Think.",
    "max_output_tokens": 400,
    "metadata": {"course": "sums"},
    "extra_body": BEAM,
}


async def heard(stream: AsyncIterator[Any]) -> list[dict[str, Any]]:
    return [event.model_dump(exclude_unset=True) async for event in stream]


async def test_a_response_has_the_chosen_solution_and_the_request(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    response = await ai.responses.create(**ASKED)
    job = (await http.get(f"/v1/jobs/{job_of(response.id)}")).json()
    assert response.status == job["status"] == "completed"
    assert response.output_text == job["result"]["text"]
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.instructions, response.max_output_tokens) == ("Think.", 400)
    assert (response.metadata, response.background) == ({"course": "sums"}, False)
    assert job["spec"]["messages"] == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1 + 1?"},
    ]
    assert job["spec"]["budget"]["tokens"] == 400
    usage = Usage.model_validate(job["usage"])
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage.prompt, usage.total)
    assert response.usage.output_tokens_details.reasoning_tokens < usage.total <= 400
    assert (await ai.responses.retrieve(response.id)) == response


async def test_a_stream_ends_with_the_response_that_its_events_built(ai: AsyncOpenAI, worker: None) -> None:
    """OpenAI's client assembles the response from the events; it must equal the complete one at the end."""
    async with ai.responses.stream(**ASKED) as stream:
        told = [event.delta async for event in stream if event.type == "response.reasoning_summary_text.delta"]
        final = await stream.get_final_response()
    whole = await ai.responses.retrieve(final.id)
    assert final.output_text == whole.output_text != ""
    assert whole.output[0] == final.output[0]
    assert "".join(told) == whole.output[0].summary[0].text  # type: ignore[union-attr]
    assert any(line.startswith("Pruned: ") for line in told)


async def test_events_are_numbered_without_a_gap_and_every_item_is_closed(ai: AsyncOpenAI, worker: None) -> None:
    events = await heard(await ai.responses.create(**ASKED, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert names[-1] == "completed"
    for opened, closed in [("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")]:
        assert names.count(opened) == names.count(closed) > 0
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == events[-1]["response"]["output"][1]["content"][0]["text"]


async def test_a_background_response_runs_alone_and_its_stream_resumes_at_any_event_after_a_restart(
    settings: Settings, url: str, store: JobStore
) -> None:
    async with listening(settings) as address, AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as ai:
        stream = await ai.responses.create(**ASKED, background=True, stream=True)
        first = await anext(aiter(stream))
        await stream.close()  # before a worker has claimed it
        response_id = first.response.id  # type: ignore[union-attr]
        assert (await ai.responses.retrieve(response_id)).status == "queued"
    async with working(url, store):
        await store.wait_for_end(job_of(response_id), 60)
    async with listening(settings) as address, AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as ai:
        whole = await heard(await ai.responses.retrieve(response_id, stream=True))
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[0] == first.model_dump(exclude_unset=True)
        for after in range(len(whole)):
            rest = await ai.responses.retrieve(response_id, stream=True, starting_after=after)
            assert await heard(rest) == whole[after + 1 :]
        again = await ai.responses.retrieve(response_id)
        assert again.to_dict() == whole[-1]["response"]
        assert (again.background, again.instructions) == (True, "Think.")


async def test_a_live_stream_has_the_same_sequence_numbers_as_a_later_one(ai: AsyncOpenAI, worker: None) -> None:
    live = await heard(await ai.responses.create(**ASKED, stream=True))
    assert await heard(await ai.responses.retrieve(live[0]["response"]["id"], stream=True)) == live


async def test_a_background_response_is_polled_cancelled_and_deleted(ai: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    response = await ai.responses.create(**ASKED, background=True)
    assert (response.status, response.output, response.usage) == ("queued", [], None)
    with pytest.raises(openai.ConflictError):
        await ai.responses.delete(response.id)
    cancelled = await ai.responses.cancel(response.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "")
    assert await ai.responses.cancel(response.id) == cancelled
    events = await heard(await ai.responses.retrieve(response.id, stream=True))
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "cancelled")
    await ai.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(response.id)
    assert (await http.get(f"/v1/jobs/{job_of(response.id)}")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_cancels_its_response(
    ai: AsyncOpenAI, http: httpx.AsyncClient, stream: bool
) -> None:
    async def ask_for_ever() -> None:
        async for _ in await ai.responses.create(**ASKED, stream=stream):
            pass

    asking = asyncio.create_task(ask_for_ever())
    jobs: list[dict[str, Any]] = []
    while not jobs:
        jobs = (await http.get("/v1/jobs")).json()["data"]
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    ended = (await http.get(f"/v1/jobs/{jobs[0]['id']}", params={"wait": 10})).json()
    assert ended["status"] == "cancelled"


async def test_a_job_of_another_route_can_be_retrieved_as_a_response(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    job = (await http.post("/v1/jobs", json={"problem": "1 + 1?", "seed": 1}, headers={"Prefer": "wait=30"})).json()
    response = await ai.responses.retrieve(job["id"].replace("job_", "resp_"))
    assert (response.status, response.output_text) == (job["status"], job["result"]["text"])


async def test_a_conversation_continues_with_the_output_of_a_response(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    first = await ai.responses.create(**ASKED)
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}]
    history += [item.to_dict() for item in first.output]
    history += [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "And 1 + 2?"}]
    second = await ai.responses.create(model=MODEL, input=history, max_output_tokens=100)
    spec = (await http.get(f"/v1/jobs/{job_of(second.id)}")).json()["spec"]
    assert [(turn["role"], turn["content"]) for turn in spec["messages"]] == [
        ("user", "1 + 1?"),
        ("assistant", first.output_text),
        ("system", "Be short."),
        ("user", "And 1 + 2?"),
    ]


async def test_a_response_continues_the_previous_one_without_its_instructions(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    first = await ai.responses.create(**ASKED)
    second = await ai.responses.create(
        **(ASKED | {"input": "And 1 + 2?", "instructions": "Be short."}), previous_response_id=first.id
    )
    third = await ai.responses.create(
        model=MODEL, input="And 1 + 3?", previous_response_id=second.id, max_output_tokens=1, background=True
    )
    spec = (await http.get(f"/v1/jobs/{job_of(second.id)}")).json()["spec"]
    told = [("user", "1 + 1?"), ("assistant", first.output_text), ("user", "And 1 + 2?")]
    assert [(turn["role"], turn["content"]) for turn in spec["messages"]] == [("system", "Be short."), *told]
    spec = (await http.get(f"/v1/jobs/{job_of(third.id)}")).json()["spec"]
    assert [(turn["role"], turn["content"]) for turn in spec["messages"]] == [
        *told,
        ("assistant", second.output_text),
        ("user", "And 1 + 3?"),
    ]
    assert (await ai.responses.retrieve(third.id)).previous_response_id == second.id


async def test_input_items_are_paged_in_either_order(ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None) -> None:
    first = await ai.responses.create(**(ASKED | {"instructions": "Be short."}))
    second = await ai.responses.create(
        model=MODEL, input="And 1 + 2?", previous_response_id=first.id, max_output_tokens=1
    )
    told = [("user", "1 + 1?"), ("assistant", first.output_text), ("user", "And 1 + 2?")]

    def said(items: list[Any]) -> list[tuple[str, str]]:
        return [(item.role, item.content[0].text) for item in items]

    assert said((await ai.responses.input_items.list(first.id)).data) == told[:1]
    assert said((await ai.responses.input_items.list(second.id)).data) == told[::-1]
    paged = [item async for item in ai.responses.input_items.list(second.id, order="asc", limit=1)]
    assert said(paged) == told
    assert len({item.id for item in paged}) == 3
    path = f"/v1/responses/{second.id}/input_items"
    for query, param in (("after=msg_x", "after"), ("limit=0", "limit"), ("order=up", "order"), ("n=1", "n")):
        refused = await http.get(f"{path}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await http.get(f"/v1/responses/resp_{'0' * 32}/input_items")).status_code == 404


async def test_a_response_without_text_cannot_be_continued(ai: AsyncOpenAI) -> None:
    waiting = await ai.responses.create(**ASKED, background=True)
    for response_id, refusal in ((waiting.id, openai.BadRequestError), ("resp_" + "0" * 32, openai.NotFoundError)):
        with pytest.raises(refusal) as refused:
            await ai.responses.create(**ASKED, previous_response_id=response_id)
        assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize("query", [{"stream": True, "starting_after": 10_000}, {"starting_after": 0}])
async def test_a_stream_cannot_start_after_an_event_that_does_not_exist(ai: AsyncOpenAI, query: dict[str, Any]) -> None:
    response = await ai.responses.create(**ASKED, background=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await ai.responses.retrieve(response.id, **query)
    assert refused.value.param == "starting_after"


@pytest.mark.parametrize("response_id", ["resp_" + "0" * 32, "resp_x", "job_" + "0" * 32, "é"])
async def test_an_unknown_response_is_not_found(ai: AsyncOpenAI, response_id: str) -> None:
    for call in (ai.responses.retrieve, ai.responses.cancel, ai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(response_id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
async def test_a_client_with_an_idempotency_key_can_disconnect_and_get_the_same_job(
    http: httpx.AsyncClient, url: str, store: JobStore, route: str, stream: bool
) -> None:
    asked = {"model": MODEL, "stream": stream} | (
        {"input": "1 + 1?"} if route == "responses" else {"messages": [{"role": "user", "content": "1 + 1?"}]}
    )
    headers = {"Idempotency-Key": "once"}
    asking = asyncio.create_task(http.post(f"/v1/{route}", json=asked, headers=headers))
    jobs: list[dict[str, Any]] = []
    while not jobs:
        jobs = (await http.get("/v1/jobs")).json()["data"]
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    again = asyncio.create_task(http.post(f"/v1/{route}", json=asked, headers=headers))
    async with working(url, store):
        answer = await again
    assert answer.status_code == 200
    [job] = (await http.get("/v1/jobs")).json()["data"]
    assert (job["id"], job["status"]) == (jobs[0]["id"], "completed")
    assert job["id"].removeprefix("job_") in answer.text
    conflict = await http.post(f"/v1/{route}", json=asked | {"seed": 5}, headers=headers)
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (400, "idempotency_conflict")
