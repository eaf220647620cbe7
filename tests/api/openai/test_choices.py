"""Several choices of one completion, the best solutions of the next answers, and log-probabilities of their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from tests.api.openai_client import MODEL, QUESTION, address, ai, http, job_of, talking, worker
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["address", "ai", "http", "worker"]

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
VOTE: dict[str, Any] = {"strategy": {"name": "weighted_vote", "n": 8}, "budget": {"tokens": 2000}}
ASKED: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "extra_body": VOTE}


async def test_choices_are_distinct_answers_in_the_order_of_the_vote(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    one, several = await ai.chat.completions.create(**ASKED), await ai.chat.completions.create(**ASKED, n=8)
    job = (await http.get(f"/v1/jobs/{job_of(several.id)}")).json()
    result = job["result"]
    assert job["spec"]["alternatives"] == 7
    assert 2 < len(result["votes"]) == len(several.choices) < 8
    assert [choice.index for choice in several.choices] == list(range(len(several.choices)))
    assert several.choices[0] == one.choices[0]
    texts = [choice.message.content for choice in several.choices]
    assert texts == [result["text"], *(alternative["text"] for alternative in result["alternatives"])]
    answers = [result["answer"], *(alternative["answer"] for alternative in result["alternatives"])]
    assert answers == [vote["answer"] for vote in result["votes"]]
    assert {choice.finish_reason for choice in several.choices} == {"stop"}
    narration = [(choice.message.model_extra or {})["reasoning_content"] for choice in several.choices]
    assert narration[0]
    assert not any(narration[1:])  # the search is described once
    two = await ai.chat.completions.create(**ASKED, n=2)
    assert two.choices == several.choices[:2]


async def test_the_tokens_of_all_choices_are_shown(ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None) -> None:
    several = await ai.chat.completions.create(**ASKED, n=3)
    tree = (await http.get(f"/v1/jobs/{job_of(several.id)}/tree")).json()
    job = (await http.get(f"/v1/jobs/{job_of(several.id)}")).json()
    shown = {job["result"]["node"], *(alternative["node"] for alternative in job["result"]["alternatives"])}
    assert len(shown) == 3
    visible = sum(node["tokens"] for node in tree["nodes"] if node["id"] in shown)
    assert several.usage is not None
    assert several.usage.completion_tokens_details is not None
    assert several.usage.completion_tokens_details.reasoning_tokens == several.usage.completion_tokens - visible


async def test_nodes_of_several_choices_are_counted_once(
    ai: AsyncOpenAI, http: httpx.AsyncClient, worker: None
) -> None:
    body = {"strategy": {"name": "beam", "n": 8}, "budget": {"tokens": 2000}}
    several = await ai.chat.completions.create(**ASKED | {"extra_body": body}, n=8)
    job = (await http.get(f"/v1/jobs/{job_of(several.id)}")).json()
    tree = {node["id"]: node for node in (await http.get(f"/v1/jobs/{job_of(several.id)}/tree")).json()["nodes"]}
    shown = [job["result"]["node"], *(alternative["node"] for alternative in job["result"]["alternatives"])]
    assert len(shown) == len(several.choices) > 1
    paths = [node.split(".") for node in shown]
    nodes = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    assert several.usage is not None
    assert several.usage.completion_tokens_details is not None
    hidden = several.usage.completion_tokens - several.usage.completion_tokens_details.reasoning_tokens
    assert hidden == sum(tree[node]["tokens"] for node in nodes)


async def test_chunks_of_each_choice_have_its_index(ai: AsyncOpenAI, worker: None) -> None:
    whole = await ai.chat.completions.create(**ASKED, n=3)
    stream = await ai.chat.completions.create(**ASKED, n=3, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    by_index: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk.choices:
            by_index[choice.index].append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for index, parts in by_index.items():
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == whole.choices[index].message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


async def test_a_search_of_one_solution_has_one_choice(ai: AsyncOpenAI, worker: None) -> None:
    body = {"strategy": {"name": "greedy"}}
    answer = await ai.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, n=4, extra_body=body)
    assert len(answer.choices) == 1


@pytest.fixture
async def real(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of the real engine with the bundled policy."""
    engine = LocalEngine({MODEL: POLICY}, EngineOptions(kv_tokens=8192))
    async with talking(settings, url, store, engine) as client:
        yield client
    await engine.close()


async def test_log_probabilities_are_those_of_the_contents_tokens(real: AsyncOpenAI) -> None:
    search = {"strategy": {"name": "self_consistency", "n": 6}, "budget": {"tokens": 4000}}
    question = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
    asked = ASKED | {"extra_body": search, "n": 2, "logprobs": True}
    asked["messages"] = [{"role": "user", "content": question}]
    answer = await real.chat.completions.create(**asked, top_logprobs=4)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens).strip("\n") == (choice.message.content or "").strip("\n")
        assert all(bytes(token.bytes or []).decode() == token.token for token in tokens)
        for token in tokens:
            values = [other.logprob for other in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert len(values) == 4
            assert token.logprob <= values[0] <= 0
            assert {other.token: other.logprob for other in token.top_logprobs}.get(token.token, token.logprob) == (
                token.logprob
            )
    stream = await real.chat.completions.create(**asked, top_logprobs=4, stream=True)
    streamed: dict[int, list[Any]] = defaultdict(list)
    async for chunk in stream:
        for part in chunk.choices:
            streamed[part.index] += (part.logprobs and part.logprobs.content) or []
    assert [streamed[index] for index in (0, 1)] == [
        choice.logprobs.content for choice in answer.choices if choice.logprobs
    ]
    bare = await real.chat.completions.create(**asked)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)
