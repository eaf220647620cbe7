"""Tools through Anthropic's own client: the documented loop of tool_use, tool_result and answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from engine.protocol.types import Branch, ModelInfo, TokenizeRequest
from tests.api.anthropic.client import MODEL, talking
from tests.scripted import EOS, TEXTS, ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

CALLS, WORDS = 5, 6
CALL_TEXT = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{{ call.arguments }}</tool_call>{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": SCHEMA,
    "strict": True,
    "cache_control": {"type": "ephemeral"},
}
TIME: Any = {
    "name": "get_time",
    "description": "The time.",
    "input_schema": {"type": "object"},
    "input_examples": [{"zone": "CET"}],
}
QUESTION: Any = {"role": "user", "content": "How is the weather in Paris?"}
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 500,
    "tools": [WEATHER, TIME],
    "extra_body": {"strategy": {"name": "self_consistency", "n": 4}, "verifier": None},
}


class WeatherBot(ScriptedEngine):
    """A model that calls both functions, and answers in words once it has their results."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[Any] = []
        self.tools: list[Any] = []

    async def models(self) -> list[ModelInfo]:
        return [replace(info, chat_template=TEMPLATE) for info in await super().models()]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        text = request.text
        if not isinstance(text, str):
            self.rendered.append(text)
            self.tools.append(request.template_kwargs.get("tools"))
            request = replace(request, text="result?" if text[-1]["role"] == "tool" else "how?")
        return await super().tokenize(request)

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        return {len("how?"): CALLS, len("result?"): WORDS}.get(position, EOS)


@pytest.fixture
def bot(monkeypatch: pytest.MonkeyPatch) -> WeatherBot:
    monkeypatch.setitem(TEXTS, CALLS, CALL_TEXT)
    monkeypatch.setitem(TEXTS, WORDS, "It is sunny at nine.")
    return WeatherBot()


@pytest.fixture
async def client(settings: Settings, url: str, store: JobStore, bot: WeatherBot) -> AsyncIterator[AsyncAnthropic]:
    async with talking(settings, url, store, bot) as client:
        yield client


async def test_the_loop_of_call_result_and_answer(client: AsyncAnthropic, bot: WeatherBot) -> None:
    messages = [QUESTION]
    first = await client.messages.create(messages=messages, thinking={"type": "adaptive"}, **ASK)
    assert first.stop_reason == "tool_use"
    thinking, text, *calls = first.content
    assert (thinking.type, text.type, text.text) == ("thinking", "text", "Let me look.")  # type: ignore[union-attr]
    assert [(call.name, call.input) for call in calls] == [("get_weather", {"city": "Paris"}), ("get_time", {})]  # type: ignore[union-attr]
    messages.append({"role": "assistant", "content": first.content})
    weather: Any = {"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [weather, weather]},  # type: ignore[union-attr]
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no clock", "is_error": True},  # type: ignore[union-attr]
    ]
    messages.append({"role": "user", "content": results})
    last = await client.messages.create(messages=messages, **ASK)
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "It is sunny at nine.")  # type: ignore[union-attr]
    assistant, *tools = bot.rendered[-1][1:]
    assert assistant["content"] == "Let me look."  # without the thinking block
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Paris"}, {}]
    assert [tool["content"] for tool in tools] == ["sunny\nsunny", "Error: no clock"]
    shown = {tool["function"]["name"]: tool["function"] for tool in bot.tools[-1]}
    assert shown["get_weather"]["parameters"] == SCHEMA
    assert shown["get_time"]["description"] == 'The time.\n\nExamples of its input:\n{"zone": "CET"}'


async def test_a_stream_has_the_calls_in_pieces(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(messages=[QUESTION], **ASK)
    pieces: dict[int, str] = {}
    async with client.messages.stream(messages=[QUESTION], **ASK) as stream:
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces[event.index] = pieces.get(event.index, "") + event.delta.partial_json
        final = await stream.get_final_message()
    assert [json.loads(text) for text in pieces.values()] == [{"city": "Paris"}, {}]
    assert [(b.name, b.input) for b in final.content[1:]] == [(b.name, b.input) for b in whole.content[1:]]  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"


async def test_the_sdks_own_loop_runs_the_tools(client: AsyncAnthropic, bot: WeatherBot) -> None:
    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Return the weather.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    @beta_async_tool
    async def get_time() -> str:
        """Return the time."""
        return "9:00"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        tools=[get_weather, get_time],
        messages=[QUESTION],
        extra_body=ASK["extra_body"],
        betas=["context-management-2025-06-27"],
    )
    last = await runner.until_done()
    assert last.content[0].text == "It is sunny at nine."  # type: ignore[union-attr]
    assert [message["content"] for message in bot.rendered[-1][-2:]] == ["sunny in Paris", "9:00"]


async def test_choices_among_tools(client: AsyncAnthropic) -> None:
    async def called(choice: Any) -> list[str]:
        message = await client.messages.create(messages=[QUESTION], tool_choice=choice, **ASK)
        return [block.name for block in message.content if block.type == "tool_use"]

    both = ["get_weather", "get_time"]
    assert await called({"type": "auto"}) == await called({"type": "any"}) == both
    assert await called({"type": "none"}) == []
    assert await called({"type": "tool", "name": "get_weather"}) == []  # every solution calls both
    assert await called({"type": "auto", "disable_parallel_tool_use": True}) == []


CALL: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_time", "input": {}}]}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [QUESTION, CALL]}, r"messages\.1\.content\.0: the call 't1' has no result"),
        ({"messages": [QUESTION, CALL, QUESTION]}, r"messages\.1\.content\.0: the call 't1' has no result"),
        (
            {"messages": [QUESTION, CALL, {"role": "user", "content": [RESULT | {"tool_use_id": "t2"}]}]},
            r"messages\.2\.content\.0\.tool_use_id: no tool_use .* 't2'; those without a result are 't1'",
        ),
        (
            {"messages": [QUESTION, CALL, {"role": "user", "content": [{"type": "text", "text": "a"}, RESULT]}]},
            r"messages\.2\.content\.1: results come before texts",
        ),
        ({"messages": [{"role": "user", "content": CALL["content"]}]}, r"messages\.0\.content\.0: .*assistant's"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: there is no function 'x'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice: there is no such choice; known are auto, any, tool"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice: there is no function to call"),
        ({"tools": [WEATHER, WEATHER]}, "tools: the tool 'get_weather' is listed twice"),
        ({"tools": [WEATHER | {"name": "no name"}]}, r"tools\.0\.name: "),
        ({"tools": [WEATHER | {"input_schema": {"type": "array"}}]}, r"tools\.0\.input_schema: .*object"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, r"tools\.0\.defer_loading"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\.0: .*reads no web: define"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\.0: .*input_schema"),
        ({"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]}, r"\{'type': 'python'\}"),
        ({"tools": [{"type": "other"}]}, r"tools\.0: there is no such type of tool; known are custom"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    client: AsyncAnthropic, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as refusal:
        await client.messages.create(**{"messages": [QUESTION]} | ASK | fields)
    assert refusal.value.type == "invalid_request_error"
