"""Functions of the client through OpenAI's own client: the documented loop of call, result and answer, and streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, UnprocessableEntityError

from engine.protocol.types import Branch, ModelInfo, TokenizeRequest
from tests.api.openai_client import MODEL, talking
from tests.scripted import EOS, TEXTS, ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

CALLS, WORDS = 5, 6
CALL_TEXT = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{{ call.arguments }}</tool_call>{% endif %}"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
FLAT: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
SEARCH: dict[str, Any] = {"strategy": {"name": "self_consistency", "n": 4}, "verifier": None, "budget": {"tokens": 500}}
QUESTION: Any = {"role": "user", "content": "How is the weather in Paris?"}


class WeatherBot(ScriptedEngine):
    """A model that calls both functions, and answers in words once it has their results."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[Any] = []

    async def models(self) -> list[ModelInfo]:
        return [replace(info, chat_template=TEMPLATE) for info in await super().models()]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        text = request.text
        if not isinstance(text, str):
            self.rendered.append(text)
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
async def ai(settings: Settings, url: str, store: JobStore, bot: WeatherBot) -> AsyncIterator[AsyncOpenAI]:
    async with talking(settings, url, store, bot) as client:
        yield client


async def test_the_loop_of_call_result_and_answer(ai: AsyncOpenAI, bot: WeatherBot) -> None:
    messages = [QUESTION]
    first = await ai.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, TIME], extra_body=SEARCH)
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    messages.append(choice.message)
    results = {"get_weather": "sunny", "get_time": "9:00"}
    messages += [{"role": "tool", "tool_call_id": call.id, "content": results[call.function.name]} for call in calls]
    last = await ai.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, TIME], extra_body=SEARCH)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].message.content == "It is sunny at nine."
    assert last.choices[0].message.tool_calls is None
    assistant, *tools = bot.rendered[-1][1:]
    assert assistant["content"] == "Let me look."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Paris"}, {}]
    assert [tool["content"] for tool in tools] == ["sunny", "9:00"]


async def test_the_tokens_of_calls_are_no_reasoning(ai: AsyncOpenAI) -> None:
    question: Any = {"model": MODEL, "extra_body": SEARCH, "stream_options": {"include_usage": True}, "stream": True}
    chunks = await ai.chat.completions.create(messages=[QUESTION], tools=[WEATHER, TIME], **question)
    [streamed] = [chunk.usage async for chunk in chunks if chunk.usage is not None]
    whole = await ai.responses.create(model=MODEL, input="Weather?", tools=FLAT, extra_body=SEARCH)
    answered: Any = whole.usage
    counts = [
        (streamed.completion_tokens, streamed.completion_tokens_details.reasoning_tokens),  # type: ignore[union-attr]
        (answered.output_tokens, answered.output_tokens_details.reasoning_tokens),
    ]
    assert counts == [(8, 6)] * 2  # four solutions of two tokens each, of which one is shown


async def test_a_stream_has_the_calls_in_pieces_by_index(ai: AsyncOpenAI) -> None:
    whole: Any = None
    async with ai.chat.completions.stream(
        model=MODEL, messages=[QUESTION], tools=[WEATHER], extra_body=SEARCH | {"tool_vote": "exact"}
    ) as stream:
        async for event in stream:
            if event.type == "error":
                raise AssertionError(event)
        whole = await stream.get_final_completion()
    # get_time is not among the functions, so that no solution may end with it
    assert whole.choices[0].message.tool_calls is None
    chunks = await ai.chat.completions.create(
        model=MODEL, messages=[QUESTION], tools=[WEATHER, TIME], extra_body=SEARCH, stream=True
    )
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    reasons = []
    async for chunk in chunks:
        [choice] = chunk.choices
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            function: Any = call.function
            if call.id is not None:
                assert call.index not in names
                names[call.index] = function.name
            texts[call.index] = texts.get(call.index, "") + function.arguments
    assert names == {0: "get_weather", 1: "get_time"}
    assert {index: json.loads(text) for index, text in texts.items()} == {0: {"city": "Paris"}, 1: {}}
    assert reasons[-1] == "tool_calls"


async def test_calls_are_parsed_into_pydantic_models(ai: AsyncOpenAI) -> None:
    answer = await ai.chat.completions.parse(
        model=MODEL,
        messages=[QUESTION],
        tools=[WEATHER, TIME | {"function": TIME["function"] | {"strict": True}}],
        extra_body=SEARCH,
    )
    call: Any = (answer.choices[0].message.tool_calls or [None])[0]
    assert call.function.parsed_arguments == {"city": "Paris"}


async def test_responses_call_functions_and_go_on_by_their_id(ai: AsyncOpenAI, bot: WeatherBot) -> None:
    first = await ai.responses.create(model=MODEL, input="How is the weather?", tools=FLAT, extra_body=SEARCH)
    calls: Any = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather", "get_time"]
    assert first.output_text == "Let me look."
    assert [tool.type for tool in first.tools] == ["function", "function"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
    by_id = await ai.responses.create(
        model=MODEL, input=results, previous_response_id=first.id, tools=FLAT, extra_body=SEARCH
    )
    assert by_id.output_text == "It is sunny at nine."
    rendered = bot.rendered[-1]
    whole: Any = [{"role": "user", "content": "How is the weather?"}, *first.output, *results]
    by_items = await ai.responses.create(model=MODEL, input=whole, tools=FLAT, extra_body=SEARCH)
    assert by_items.output_text == "It is sunny at nine."
    assert bot.rendered[-1] == rendered
    items = await ai.responses.input_items.list(by_id.id, order="asc")
    kinds = ["message", "message", *["function_call"] * 2, *["function_call_output"] * 2]
    assert [item.type for item in items.data] == kinds


async def test_items_of_a_response_are_named_by_their_ids(ai: AsyncOpenAI, bot: WeatherBot) -> None:
    """Vercel's AI SDK names what it got, instead of sending it back."""
    first = await ai.responses.create(model=MODEL, input="How is the weather?", tools=FLAT, extra_body=SEARCH)
    calls: Any = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    asked: Any = {"role": "user", "content": "How is the weather?"}
    second = await ai.responses.create(model=MODEL, input=[asked, *named, *results], tools=FLAT, extra_body=SEARCH)
    assert second.output_text == "It is sunny at nine."
    whole = bot.rendered[-1]
    given = await ai.responses.input_items.list(second.id, order="asc")
    again: Any = [{"id": item.id} for item in given.data]  # a type is not needed
    third = await ai.responses.create(model=MODEL, input=again, tools=FLAT, extra_body=SEARCH)
    assert third.output_text == "It is sunny at nine."
    assert bot.rendered[-1] == whole


async def test_a_responses_stream_has_the_events_of_calls(ai: AsyncOpenAI) -> None:
    stream = await ai.responses.create(model=MODEL, input="Weather?", tools=FLAT, extra_body=SEARCH, stream=True)
    texts: dict[str, str] = {}
    done: dict[str, str] = {}
    final: Any = None
    async for event in stream:
        match event.type:
            case "response.function_call_arguments.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            case "response.function_call_arguments.done":
                done[event.item_id] = event.arguments
            case "response.completed":
                final = event.response
    assert texts == done
    calls = [item for item in final.output if item.type == "function_call"]
    assert {call.id: call.arguments for call in calls} == done


async def test_none_and_required_and_a_named_function(ai: AsyncOpenAI, bot: WeatherBot) -> None:
    question: Any = {"model": MODEL, "messages": [QUESTION], "tools": [WEATHER, TIME], "extra_body": SEARCH}
    none = await ai.chat.completions.create(**question, tool_choice="none")
    assert none.choices[0].message.tool_calls is None
    required = await ai.chat.completions.create(**question, tool_choice="required")
    assert required.choices[0].finish_reason == "tool_calls"
    one: Any = {"type": "function", "function": {"name": "get_weather"}}
    named = await ai.chat.completions.create(**question, tool_choice=one)  # every solution calls both
    assert named.choices[0].message.tool_calls is None
    single = await ai.chat.completions.create(**question, parallel_tool_calls=False)
    assert single.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "known are function, python and code_interpreter"),
        ({"tools": [WEATHER, WEATHER]}, "listed twice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no function 'x'"),
        ({"tools": [WEATHER], "tool_format": "xml"}, "no format 'xml'; known are"),
        ({"functions": [{"name": "f"}]}, "not supported: give 'tools'"),
        ({"messages": [QUESTION, {"role": "tool", "tool_call_id": "a", "content": "b"}]}, "no call before it"),
        ({"messages": [QUESTION, {"role": "assistant", "content": None}]}, "it is empty"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(ai: AsyncOpenAI, fields: dict[str, Any], message: str) -> None:
    async with httpx.AsyncClient(base_url=str(ai.base_url), timeout=60) as http:
        body = {"model": MODEL, "messages": [QUESTION]} | SEARCH | fields
        answer = await http.post("chat/completions", json=body)
    assert answer.status_code in (400, 422)
    assert message in answer.json()["error"]["message"]


async def test_openais_errors_name_the_field(ai: AsyncOpenAI) -> None:
    bad: Any = {"type": "function", "function": {"name": "no name"}}
    with pytest.raises((BadRequestError, UnprocessableEntityError), match=r"tools\.0"):
        await ai.chat.completions.create(model=MODEL, messages=[QUESTION], tools=[bad])
