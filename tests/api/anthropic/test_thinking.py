"""Thinking blocks and structured output through Anthropic's own client, of the bundled model that thinks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message
from pydantic import BaseModel

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from reasoner.jobs.job import Job
from tests.api.anthropic.client import job_of, talking
from tests.seeds import shift
from workers.config.settings import Settings
from workers.store.jobs import JobStore

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
PROBLEM = "Make 68 with + - * / from the numbers 10, 12 and 8, each used exactly once."
QUESTION: Any = {"role": "user", "content": PROBLEM}
ADAPTIVE: dict[str, Any] = {"thinking": {"type": "adaptive"}}
LIMITED: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 40}}
GREEDY = {"seed": shift(5), "strategy": {"name": "greedy"}, "deterministic": True}
VOTE = GREEDY | {"strategy": {"name": "self_consistency", "n": 4}}
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 4000, "extra_body": GREEDY}


class Verdict(BaseModel):
    """A structure with few texts, so that any model ends it."""

    kind: Literal["sum", "product"]
    is_possible: bool


@pytest.fixture
async def client(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncAnthropic]:
    models = {"policy": BUNDLED / "policy-thinking", "prm": BUNDLED / "prm"}
    engine = LocalEngine(models, EngineOptions(kv_tokens=16_384, draft="off"))
    async with talking(settings, url, store, engine) as client:
        yield client


async def read_job(client: AsyncAnthropic, message: Message) -> Job:
    return Job.model_validate(await client.get(f"/v1/jobs/{job_of(message.id)}", cast_to=dict[str, Any]))


def read_blocks(message: Message) -> dict[str, Any]:
    """Return the blocks by their types, of which there is one each."""
    blocks = {block.type: block for block in message.content}
    assert len(blocks) == len(message.content)
    return blocks


@pytest.mark.parametrize("thinking", [ADAPTIVE, LIMITED], ids=["adaptive", "budget_tokens"])
@pytest.mark.parametrize("search", [GREEDY, VOTE], ids=["greedy", "vote"])
async def test_the_thinking_block_is_the_thought_of_the_chosen_solution(
    client: AsyncAnthropic, thinking: dict[str, Any], search: dict[str, Any]
) -> None:
    asked: dict[str, Any] = ASK | {"messages": [QUESTION], "extra_body": search} | thinking
    message = await client.messages.create(**asked)
    job, blocks = await read_job(client, message), read_blocks(message)
    assert job.result is not None
    assert list(blocks) == ["thinking", "text"]
    assert blocks["thinking"].thinking == job.result.thought != ""
    assert blocks["thinking"].signature
    assert "<think>" not in blocks["text"].text
    limit = thinking["thinking"].get("budget_tokens")
    assert job.spec.budget.thinking_tokens == limit
    num_solutions = search["strategy"].get("n", 1)
    assert limit is None or 0 < job.usage.thought <= num_solutions * limit
    details = message.usage.output_tokens_details
    assert details is not None
    if num_solutions == 1:
        assert details.thinking_tokens == job.usage.thought
    async with client.messages.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    pieces = [event.thinking for event in events if event.type == "thinking"]
    assert "".join(pieces) == blocks["thinking"].thinking
    assert read_blocks(final)["text"].text == blocks["text"].text
    assert read_blocks(final)["thinking"].thinking == blocks["thinking"].thinking
    assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)


async def test_a_limit_of_nothing_closes_the_thought_at_once(client: AsyncAnthropic) -> None:
    message = await client.messages.create(**ASK, messages=[QUESTION], thinking={"type": "disabled"})
    job = await read_job(client, message)
    assert [block.type for block in message.content] == ["text"]
    assert job.usage.thought == 0
    hidden = await client.messages.create(**ASK, messages=[QUESTION])
    assert [block.type for block in hidden.content] == ["text"]
    assert (await read_job(client, hidden)).usage.thought > 0


@pytest.mark.parametrize("signature", ["ours", "another"])
async def test_a_second_turn_takes_the_thinking_block_back_and_the_model_does_not_see_it(
    client: AsyncAnthropic, signature: str
) -> None:
    first = await client.messages.create(**ASK, messages=[QUESTION], **LIMITED)
    content: list[Any] = [block.to_dict() for block in first.content]
    if signature == "another":
        content[0]["signature"] = "EqQBCgIYAhIM"
        content.insert(1, {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"})
    again: Any = {"role": "user", "content": "Make 4 with + - * / from the numbers 1 and 3, each used exactly once."}
    history = [QUESTION, {"role": "assistant", "content": content}, again]
    second = await client.messages.create(**ASK, messages=history, **LIMITED)
    assert [block.type for block in second.content] == ["thinking", "text"]
    messages = (await read_job(client, second)).spec.messages
    assert messages is not None
    assert [message.content for message in messages] == [
        PROBLEM,
        read_blocks(first)["text"].text,
        again["content"],
    ]


async def test_a_thought_before_a_call_goes_back_with_the_call(client: AsyncAnthropic) -> None:
    tools: Any = [{"name": "check", "input_schema": {"type": "object", "properties": {"sure": {"type": "boolean"}}}}]
    asked: dict[str, Any] = ASK | {"tools": tools, "extra_body": GREEDY | {"tool_format": "hermes"}} | LIMITED
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = await client.messages.create(**asked, messages=[QUESTION], tool_choice=choice)
    assert [block.type for block in called.content] == ["thinking", "tool_use"]
    assert called.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": read_blocks(called)["tool_use"].id, "content": "right"}
    history: list[Any] = [QUESTION, {"role": "assistant", "content": called.content}]
    answered = await client.messages.create(**asked, messages=[*history, {"role": "user", "content": [result]}])
    assert answered.content[0].type == "thinking"
    messages = (await read_job(client, answered)).spec.messages
    assert messages is not None
    assert [message.role for message in messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("thinking", [{}, LIMITED], ids=["hidden", "shown"])
async def test_parse_returns_the_structure_behind_the_thought(client: AsyncAnthropic, thinking: dict[str, Any]) -> None:
    asked: dict[str, Any] = ASK | {"messages": [QUESTION]} | thinking
    parsed = await client.messages.parse(**asked, output_format=Verdict)
    assert isinstance(parsed.parsed_output, Verdict)
    assert parsed.content[-1].type == "text"
    assert Verdict.model_validate_json(parsed.content[-1].text) == parsed.parsed_output
    assert (parsed.content[0].type == "thinking") == bool(thinking)
    async with client.messages.stream(**asked, output_format=Verdict) as stream:
        assert (await stream.get_final_message()).parsed_output == parsed.parsed_output
