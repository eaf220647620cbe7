"""Several choices of one completion: the best solutions of the next answers of its search."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.api.openai_client import MODEL, QUESTION, address, ai, http, job_of, worker

__all__ = ["address", "ai", "http", "worker"]

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
