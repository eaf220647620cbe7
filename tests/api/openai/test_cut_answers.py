"""Answers that were cut off say so, on both routes, as objects and as streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.conversation.narration import Narration
from api.openai.chat.answer import build_completion, stream_chunks
from api.openai.responses.body import EchoedFields
from api.openai.responses.events import ResponseEvents, stream_after
from reasoner.jobs.events import Event
from reasoner.jobs.job import Alternative
from reasoner.tools.formats.call import FunctionTool
from reasoner.tools.formats.registry import FORMATS
from tests.api.openai.test_narration import JOB, SPEC, Journal
from workers.store.broker_errors import BROKER_DOWN
from workers.store.event_log import ShuttingDown

DOCUMENT: Any = JOB | {"usage": {}}
CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
WEATHER = [FunctionTool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}}, False)]
WORDS = "Let me look."
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "pythonic": '<|python_start|>[get_weather(city="Paris")]',
}


def search(reason: str, status: str = "completed", refusal: dict[str, Any] | None = None, **result: Any) -> list[Event]:
    """Return the events of a search whose chosen solution ended for this reason."""
    write = Journal()
    chosen = {"answer": None, "text": '{"a": "b', "node": "0"} | result
    started = write.event("job.started", attempt=1)
    node = write.node("0", reason=reason, **({} if refusal is None else {"refusal": refusal}))
    return [started, node, write.end(status, **chosen)]


async def follow(events: list[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


async def ask_chat(events: list[Event]) -> tuple[str | None, str | None]:
    """Return the finish reason of the completion and that of its stream."""
    narration = Narration(SPEC)
    for event in events:
        narration.add(event)
    assert narration.end is not None
    whole = build_completion(DOCUMENT, narration, narration.end, None)
    stream = stream_chunks(DOCUMENT, Narration(SPEC), follow(events), usage=False, wanted=None)
    chunks = [json.loads(chunk) async for chunk in stream if chunk != "[DONE]"]
    return whole.choices[0].finish_reason, chunks[-1]["choices"][0]["finish_reason"]


async def ask_responses(events: list[Event]) -> dict[str, Any]:
    """Return the last event of a response's stream, whose response is the one that can be retrieved."""
    told = [event async for event in stream_after(None, ResponseEvents(DOCUMENT, EchoedFields()), follow(events))]
    return told[-1]


CUT = ("length", "context", "budget", "timeout", "repetition", "tool")


@pytest.mark.parametrize("answer", [None, "4"])
@pytest.mark.parametrize("finish_reason", ["answer", "budget", "no_answer"])
@pytest.mark.parametrize("reason", [*CUT, "stop", "answer"])
async def test_the_end_of_the_chosen_solution_is_told(reason: str, finish_reason: str, answer: str | None) -> None:
    for status in ("completed", "incomplete"):
        events = search(reason, status, finish_reason=finish_reason, answer=answer)
        expected = "length" if reason in CUT else "stop"
        assert await ask_chat(events) == (expected, expected)
        last = await ask_responses(events)
        response = last["response"]
        if reason in CUT:
            assert last["type"] == "response.incomplete"
            assert (response["status"], response["completed_at"]) == ("incomplete", None)
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        else:
            assert last["type"] == "response.completed"
            assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert response["output"][1]["status"] == response["status"]
        assert isinstance(response["created_at"], int)


@pytest.mark.parametrize("finish_reason", ["budget", "no_answer"])
async def test_an_answer_that_a_filter_cut_off_is_told_as_such(finish_reason: str) -> None:
    refusal = {"message": "the server ended the answer with 'content_filter'", "field": None, "kind": "filtered"}
    events = search("refused", "incomplete", refusal=refusal, finish_reason=finish_reason)
    assert await ask_chat(events) == ("content_filter", "content_filter")
    last = await ask_responses(events)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "content_filter"}


async def test_a_call_is_whole_however_the_search_ended() -> None:
    events = search("stop", finish_reason="budget", tool_calls=[CALL], content=None, text="", answer="[]")
    assert await ask_chat(events) == ("tool_calls", "tool_calls")
    assert (await ask_responses(events))["type"] == "response.completed"


async def test_each_choice_has_its_own_end() -> None:
    write = Journal()
    other = Alternative(answer="5", text="5 and", node="1")
    end = write.end(answer="4", text="4", node="0", alternatives=[other])
    narration = Narration(SPEC)
    for event in [write.node("0", "4"), write.node("1", "5", reason="length"), end]:
        narration.add(event)
    assert narration.end is not None
    choices = build_completion(DOCUMENT, narration, narration.end, None).choices
    assert [choice.finish_reason for choice in choices] == ["stop", "length"]


@pytest.mark.parametrize("name", CALLS)
def test_the_beginning_of_a_call_is_no_text(name: str) -> None:
    tool_format, call = FORMATS[name], CALLS[name]
    for end in range(4, len(call)):
        for before in ("", WORDS):
            text = f"{before}\n{call[:end]}" if before else call[:end]
            assert tool_format.read_cut_words(text, WEATHER, must_call=True) == before, text
            assert tool_format.read_cut_words(text, WEATHER, must_call=False) == before, text


def test_a_forced_object_is_no_text_from_its_first_character() -> None:
    tool_format = FORMATS["llama3_json"]
    for end in range(len('{"name": "get_weather", "parameters": {"city": "P')):
        text = '{"name": "get_weather", "parameters": {"city": "Paris"}}'[:end]
        assert tool_format.read_cut_words(text, WEATHER, must_call=True) == ""
    assert tool_format.read_cut_words('{"name": "Ada", "ag', WEATHER, must_call=False) == '{"name": "Ada", "ag'


@pytest.mark.parametrize("error", [ShuttingDown(), BROKER_DOWN[0]("gone")])
async def test_a_stream_that_fails_in_the_middle_ends_with_an_error(error: Exception) -> None:
    async def break_off() -> AsyncIterator[Event]:
        yield Journal().event("job.started", attempt=1)
        raise error

    stream = stream_chunks(DOCUMENT, Narration(SPEC), break_off(), usage=False, wanted=None)
    last = json.loads([chunk async for chunk in stream][-1])
    assert (last["error"]["type"], set(last["error"])) == ("server_error", {"message", "type", "param", "code"})
    told = [event async for event in stream_after(None, ResponseEvents(DOCUMENT, EchoedFields()), break_off())]
    assert told[-1]["type"] == "error"
    assert told[-1]["code"] == last["error"]["code"]
    assert {"message", "param", "sequence_number"} <= set(told[-1])


async def test_a_response_that_is_deleted_while_it_runs_ends_with_an_error() -> None:
    last = await ask_responses([Journal().event("job.started", attempt=1)])
    assert (last["type"], last["code"]) == ("error", "deleted")


async def test_a_failed_response_has_the_fields_of_every_error() -> None:
    write = Journal()
    for code, kind, shown in [
        ("engine_error", "server_error", "server_error"),
        ("invalid_request", "invalid_request_error", "invalid_prompt"),
        ("content_filter", "invalid_request_error", "invalid_prompt"),
        ("context_length_exceeded", "invalid_request_error", "context_length_exceeded"),
    ]:
        failure = {"result": None, "error": {"code": code, "message": "no"}, "usage": search("stop")[-1].data["usage"]}
        last = await ask_responses([write.event("job.started", attempt=1), write.event("job.failed", **failure)])
        assert last["type"] == "response.failed"
        error = last["response"]["error"]
        assert (error["code"], error["type"]) == (shown, kind)
        assert set(error) == {"code", "message", "type", "param"}
