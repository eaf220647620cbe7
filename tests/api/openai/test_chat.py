"""Chat completions through OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from reasoner.budget.usage import Usage
from tests.api.openai_client import MODEL, QUESTION, address, ai, http, job_of, worker, working
from workers.store.jobs import JobStore

__all__ = ["address", "ai", "http", "worker"]

VOTE: dict[str, Any] = {"strategy": {"name": "weighted_vote", "n": 8}, "budget": {"tokens": 2000}}


async def test_a_completion_is_the_chosen_solution_with_the_jobs_usage(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    answer = await ai.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, extra_body=VOTE)
    job = (await http.get(f"/v1/jobs/{job_of(answer.id)}")).json()
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == job["result"]["text"]
    assert answer.usage is not None
    usage = Usage.model_validate(job["usage"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (usage.prompt, usage.total)
    tree = (await http.get(f"/v1/jobs/{job_of(answer.id)}/tree")).json()
    chosen = next(node for node in tree["nodes"] if node["id"] == tree["best"])
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == usage.total - chosen["tokens"]
    assert answer.model_extra is not None
    assert answer.model_extra["reasoner"]["answer"] == job["result"]["answer"]
    assert answer.model_extra["reasoner"]["votes"] == job["result"]["votes"]


async def test_a_stream_has_the_narration_followed_by_the_same_answer(ai: AsyncOpenAI, worker: None) -> None:
    question: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "extra_body": VOTE}
    whole = await ai.chat.completions.create(**question)
    stream = await ai.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    told = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    text = [delta.content or "" for delta in deltas]
    assert "".join(text) == whole.choices[0].message.content
    assert "".join(told) == (whole.choices[0].message.model_extra or {})["reasoning_content"]
    assert max(place for place, part in enumerate(told) if part) < min(place for place, part in enumerate(text) if part)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_narration_is_streamed_while_the_search_runs(ai: AsyncOpenAI, url: str, store: JobStore) -> None:
    heard = asyncio.Event()

    async def run(spec: Any, engine: Any, journal: Any, *, cancelled: asyncio.Event) -> Any:
        from reasoner.run import run_job

        await heard.wait()
        return await run_job(spec, engine, journal, cancelled=cancelled)

    async with working(url, store, run):
        stream = await ai.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, extra_body=VOTE, stream=True)
        async for chunk in stream:
            told = (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
            if "weighted_vote of 8" in told:
                heard.set()  # the search continues only because the client received this
    assert heard.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_cancels_its_job(
    ai: AsyncOpenAI, http: httpx.AsyncClient, store: JobStore, stream: bool
) -> None:
    asking = asyncio.create_task(_ask_for_ever(ai, stream=stream))
    jobs: list[dict[str, Any]] = []
    while not jobs:
        jobs = (await http.get("/v1/jobs")).json()["data"]
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    ended = (await http.get(f"/v1/jobs/{jobs[0]['id']}", params={"wait": 10})).json()
    assert ended["status"] == "cancelled"


async def _ask_for_ever(ai: AsyncOpenAI, *, stream: bool) -> None:
    answer = await ai.chat.completions.create(model=MODEL, messages=QUESTION, stream=stream)
    async for _ in answer:
        pass
