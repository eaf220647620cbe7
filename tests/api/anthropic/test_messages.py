"""Messages through Anthropic's own client: plain, as streams, their usage, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from reasoner.budget.usage import Usage
from reasoner.run import run_job
from tests.api.anthropic.client import MODEL, QUESTION, client, http, job_of
from tests.api.openai_client import listening, working
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["client", "http"]

VOTE: dict[str, Any] = {"strategy": {"name": "weighted_vote", "n": 8}}
SEARCH: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 2000,
    "extra_body": VOTE | {"seed": 5},
}
THINKING: dict[str, Any] = {"thinking": {"type": "adaptive"}}


async def test_a_message_is_the_chosen_solution_with_the_jobs_usage(
    client: AsyncAnthropic, http: httpx.AsyncClient
) -> None:
    message = await client.messages.create(**SEARCH)
    job = (await http.get(f"/v1/jobs/{job_of(message.id)}")).json()
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == job["result"]["text"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = Usage.model_validate(job["usage"])
    counted = message.usage
    assert counted.input_tokens + (counted.cache_read_input_tokens or 0) == usage.prompt
    assert (counted.cache_read_input_tokens, counted.output_tokens) == (usage.cached, usage.total)
    tree = (await http.get(f"/v1/jobs/{job_of(message.id)}/tree")).json()
    chosen = next(node for node in tree["nodes"] if node["id"] == tree["best"])
    assert counted.output_tokens_details is not None
    assert counted.output_tokens_details.thinking_tokens == usage.total - chosen["tokens"]
    assert message.model_extra is not None
    assert message.model_extra["reasoner"]["votes"] == job["result"]["votes"]
    assert job["spec"]["budget"]["tokens"] == 2000


@pytest.mark.parametrize("thinking", [{}, THINKING, {"thinking": {"type": "adaptive", "display": "omitted"}}])
async def test_an_accumulated_stream_is_the_message(client: AsyncAnthropic, thinking: dict[str, Any]) -> None:
    whole = await client.messages.create(**SEARCH, **thinking)
    async with client.messages.stream(**SEARCH, **thinking) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == whole.content[-1].text  # type: ignore[union-attr]
    assert _without_ids(final) == _without_ids(whole)
    assert final.usage.output_tokens > 0


def _without_ids(message: Message) -> dict[str, Any]:
    """Return what two runs of a job have in common: not their ids, their caches or their signatures."""
    fields = message.model_dump(exclude={"id", "reasoner", "usage"})
    for block in fields["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "thinking":
            assert block.pop("signature")
    return fields | {"output_tokens": message.usage.output_tokens}


async def test_thinking_is_shown_only_where_it_is_asked_for(client: AsyncAnthropic) -> None:
    shown = await client.messages.create(**SEARCH, **THINKING)
    assert [block.type for block in shown.content] == ["thinking", "text"]
    assert shown.content[0].thinking.startswith("Searching by weighted_vote of 8")  # type: ignore[union-attr]
    hidden = await client.messages.create(**SEARCH, thinking={"type": "adaptive", "display": "omitted"})
    assert [(block.type, getattr(block, "thinking", None)) for block in hidden.content] == [
        ("thinking", ""),
        ("text", None),
    ]
    disabled = await client.messages.create(**SEARCH, thinking={"type": "disabled"})
    assert [block.type for block in disabled.content] == ["text"]


async def test_the_narration_is_streamed_while_the_search_runs(settings: Settings, url: str, store: JobStore) -> None:
    heard = asyncio.Event()

    async def run(spec: Any, engine: Any, journal: Any, *, cancelled: asyncio.Event) -> Any:
        await heard.wait()
        return await run_job(spec, engine, journal, cancelled=cancelled)

    async with (
        listening(settings) as address,
        working(url, store, run),
        AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
    ):
        narrated = SEARCH | {"extra_body": SEARCH["extra_body"] | {"reasoning_content": "narration"}}
        async for event in await client.messages.create(**narrated, **THINKING, stream=True):
            if event.type == "content_block_delta" and "weighted_vote" in getattr(event.delta, "thinking", ""):
                heard.set()  # the search continues only because the client received this
    assert heard.is_set()


async def test_the_events_of_a_stream_come_in_their_order(client: AsyncAnthropic) -> None:
    kinds = [event.type async for event in await client.messages.create(**SEARCH, **THINKING, stream=True)]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]


async def test_a_stop_sequence_ends_the_solution_and_is_named(client: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    greedy = SEARCH | {"extra_body": {"strategy": {"name": "greedy"}}}
    whole = (await client.messages.create(**greedy)).content[0].text  # type: ignore[union-attr]
    stop = f"{whole.split()[2]} "
    message = await client.messages.create(**greedy, stop_sequences=["nowhere", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert whole.startswith("".join(block.text for block in message.content))  # type: ignore[union-attr]
    assert stop not in "".join(block.text for block in message.content)  # type: ignore[union-attr]
    async with client.messages.stream(**greedy, stop_sequences=["nowhere", stop]) as stream:
        assert (await stream.get_final_message()).stop_sequence == stop


async def test_a_message_that_its_budget_cuts_says_so(client: AsyncAnthropic) -> None:
    message = await client.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=3, extra_body={"strategy": {"name": "greedy"}}
    )
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_job(
    settings: Settings, url: str, store: JobStore, stream: bool
) -> None:
    async with (
        listening(settings) as address,
        AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=address, timeout=60) as http,
    ):
        if stream:
            events: Any = await client.messages.create(**SEARCH, stream=True)
            await anext(aiter(events))
            await events.close()
        else:
            asking = asyncio.create_task(client.messages.create(**SEARCH))
            while not (await http.get("/v1/jobs")).json()["data"]:
                pass
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        [job] = (await http.get("/v1/jobs")).json()["data"]
        assert (await http.get(f"/v1/jobs/{job['id']}", params={"wait": 30})).json()["status"] == "cancelled"


async def test_a_cancelled_job_ends_its_stream_with_an_error(settings: Settings, url: str, store: JobStore) -> None:
    async with (
        listening(settings) as address,
        AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=address, timeout=60) as http,
    ):
        events: Any = await client.messages.create(**SEARCH, stream=True)
        started = await anext(aiter(events))
        await http.post(f"/v1/jobs/{job_of(started.message.id)}/cancel")
        with pytest.raises(anthropic.APIStatusError, match="cancelled") as failure:
            async for _ in events:
                pass
        assert failure.value.body["type"] == "error"
        assert failure.value.body["request_id"] == events.response.headers["request-id"]


async def test_a_request_with_an_idempotency_key_keeps_its_job(client: AsyncAnthropic) -> None:
    key = {"Idempotency-Key": "k"}
    first = await client.messages.create(**SEARCH, extra_headers=key)
    assert (await client.messages.create(**SEARCH, extra_headers=key)).id == first.id
    with pytest.raises(anthropic.BadRequestError, match="Idempotency-Key"):
        await client.messages.create(**SEARCH | {"max_tokens": 99}, extra_headers=key)
