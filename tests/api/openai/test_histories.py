"""Histories and fields that ordinary clients send: what the model gets of them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from api.conversation.thoughts import strip_thoughts
from api.openai.chat.body import ChatBody
from api.openai.responses.body import ResponseBody
from engine.protocol.thoughts import DELIMITERS
from reasoner.admission.effort import DEFAULT_EFFORTS
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.api.openai_client import MODEL
from tests.reasoner.verifiers.test_verifiers import Watching
from tests.specs import build_spec

LONG_ID = "call_" + "x" * 80
USER = {"role": "user", "content": "1 + 1?"}
CALL = {"id": LONG_ID, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": LONG_ID, "content": "2"}
NARRATION = "Searching by best_of_n of 16.\nLeading: 4, 1 of 1.\n"


def read_chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = ChatBody.model_validate({"model": MODEL, "messages": [*messages]})
    return [turn.message.render() for turn in body.to_turns()]


def read_response(*items: dict[str, Any]) -> list[dict[str, Any]]:
    body = ResponseBody.model_validate({"model": MODEL, "input": [*items]})
    return [turn.message.render() for turn in body.to_turns([], body.input)]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "system", "content": ""}, ""),
        ({"role": "developer", "content": []}, ""),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": "4", "refusal": None, "annotations": [], "audio": None}, "4"),
        ({"role": "assistant", "content": "4", "reasoning": "so", "reasoning_details": [{"type": "x"}]}, "4"),
        ({"role": "assistant", "content": "4", "reasoning_content": NARRATION, "thinking_blocks": None}, "4"),
        ({"role": "assistant", "content": "4", "tool_calls": [], "function_call": None, "parsed": {"a": 1}}, "4"),
        ({"role": "assistant", "content": f"<think>\n{NARRATION}\n</think>\n\n4"}, "4"),
        ({"role": "user", "content": "hi", "name": "ada"}, "hi"),
        ({"role": "user", "content": "hi", "type": "text"}, "hi"),  # of lm-evaluation-harness up to 0.4.9
        ({"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}, "hi"),
        ({"role": "system", "content": "hi", "cache_control": {"type": "ephemeral"}}, "hi"),
        ({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "hi"}]}, "hi"),
    ],
)
def test_a_message_of_a_chat_is_read_without_what_changes_nothing(message: dict[str, Any], content: str) -> None:
    assert read_chat(message, USER)[0]["content"] == content


@pytest.mark.parametrize("more", [{}, {"index": 0}, {"cache_control": {}}, {"provider_specific_fields": {}}])
@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("result", ["", "2", [], [{"type": "text", "text": "2"}], None])
def test_calls_of_a_chat_come_back_with_any_result(more: dict[str, Any], content: Any, result: Any) -> None:
    turns = read_chat(
        USER, {"role": "assistant", "content": content, "tool_calls": [CALL | more]}, RESULT | {"content": result}
    )
    assert [turn["content"] for turn in turns] == ["1 + 1?", content or "", "2" if result not in ("", [], None) else ""]
    assert turns[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert turns[2]["tool_call_id"] == LONG_ID


def test_arguments_that_are_empty_are_an_empty_object() -> None:
    call = CALL | {"function": {"name": "add", "arguments": ""}}
    turns = read_chat(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT)
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(("opening", "closing"), DELIMITERS)
def test_a_thought_at_the_beginning_of_an_answer_is_not_shown_again(opening: str, closing: str) -> None:
    assert strip_thoughts(f"\n{opening}\n{NARRATION}\n{closing}\n\n{opening}x{closing}It is 4.") == "It is 4."
    quoted = f"It is {opening}4{closing}."
    assert strip_thoughts(quoted) == quoted
    assert strip_thoughts(f"{opening} without an end") == f"{opening} without an end"


def test_items_of_a_response_become_the_messages_of_a_chat() -> None:
    items: list[dict[str, Any]] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": f"<think>\n{NARRATION}\n</think>"},
        {"type": "function_call", "call_id": LONG_ID, "name": "add", "arguments": '{"a": 1}', "id": "fc", "caller": {}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": []}]},
        {"type": "function_call_output", "call_id": LONG_ID, "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": None, "encrypted_content": "gAAAA"},
        {
            "type": None,
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}],
            "phase": "final_answer",
        },
    ]
    call = {"id": LONG_ID, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert read_response(*items) == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": LONG_ID},
        {"role": "assistant", "content": "No."},
    ]


@pytest.mark.parametrize("output", ["", [], [{"type": "input_text", "text": ""}]])
def test_an_empty_result_is_a_result(output: Any) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    turns = read_response(USER, call, {"type": "function_call_output", "call_id": "a", "output": output})
    assert turns[-1] == {"role": "tool", "content": "", "tool_call_id": "a"}


def test_a_conversation_of_a_thousand_messages_is_one() -> None:
    turns = [USER, {"role": "assistant", "content": "2"}] * 500
    assert len(read_chat(*turns)) == len(read_response(*turns)) == 1000
    assert build_spec({"messages": [*turns, USER]}).messages is not None


IGNORED: dict[str, Any] = {
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "s",
    "user": "u",
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name, value in IGNORED.items()),
        {"store": False},
        {"modalities": ["text"], "logit_bias": {}, "n": 1, "prediction": {"type": "content", "content": "x"}},
        {"stream_options": {"include_usage": True}, "verbosity": "medium"},
        *({"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    ],
)
def test_fields_of_a_chat_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    body = ChatBody.model_validate({"model": MODEL, "messages": [USER]} | fields)
    assert set(body.efforts().values()) <= set(DEFAULT_EFFORTS)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name, value in IGNORED.items()),
        {"store": False, "include": ["reasoning.encrypted_content", "code_interpreter_call.outputs"]},
        {"include": []},
        {"truncation": "auto"},
        {"truncation": "disabled", "top_logprobs": 0, "instructions": ""},
        {"text": {"verbosity": "medium", "format": {"type": "text"}}},
        {"reasoning": {"effort": "none", "generate_summary": "auto", "context": "current_turn", "mode": "standard"}},
    ],
)
def test_fields_of_a_response_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    ResponseBody.model_validate({"model": MODEL, "input": "1 + 1?"} | fields)


@pytest.mark.parametrize(
    ("body", "fields", "place"),
    [
        (ChatBody, {"verbosity": "low"}, "verbosity"),
        (ChatBody, {"logit_bias": {"5": 1}}, "logit_bias"),
        (ChatBody, {"modalities": ["text", "audio"]}, "modalities"),
        (ChatBody, {"web_search_options": {}}, "web_search_options"),
        (ResponseBody, {"include": ["message.output_text.logprobs"]}, "include"),
        (ResponseBody, {"conversation": "conv_1"}, "conversation"),
        (ResponseBody, {"max_tool_calls": 1}, "max_tool_calls"),
        (ResponseBody, {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        (ResponseBody, {"text": {"verbosity": "high"}}, "text.verbosity"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(body: Any, fields: dict[str, Any], place: str) -> None:
    asked = {"messages": [USER]} if body is ChatBody else {"input": "1 + 1?"}
    with pytest.raises(ValidationError) as refusal:
        body.model_validate({"model": MODEL} | asked | fields)
    assert [".".join(map(str, error["loc"])) for error in refusal.value.errors()] == [place]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": [USER | {"reasoning": 1, "tone": 2}]}, "messages.0.tone"),
        ("chat/completions", {"messages": [USER | {"message": 1}]}, "messages.0.message"),
        ("chat/completions", {"messages": [USER], "tool_choice": "maybe"}, "tool_choice"),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function"}]}, "tools.0.function"),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "custom"}]}, "tools.0"),
        (
            "chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages.1.tool_calls",
        ),
        ("chat/completions", {"messages": [USER], "user": "u" * 600}, "user"),
        ("chat/completions", {"messages": [USER], "safety_identifier": "u" * 600}, "safety_identifier"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ("responses", {"input": "1", "user": "u" * 600}, "user"),
        ("responses", {"input": ""}, "input"),
        ("responses", {"input": [USER | {"reasoning": 1}]}, "input.0.reasoning"),
        ("responses", {"input": [{"type": "reasoning", "reasoning": 1}]}, "input.0.reasoning"),
        (
            "responses",
            {"input": [USER, {"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input.1.call_id",
        ),
        ("responses", {"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input.1.id"),
        ("responses", {"input": [USER, {"id": "rs_" + "0" * 32}]}, "input.1.id"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ("responses", {"input": [{"role": "user", "content": ""}]}, "input.0.content"),
        ("responses", {"input": "1", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ],
)
async def test_an_errors_path_names_the_field_that_was_sent(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(f"/v1/{path}", json={"model": MODEL} | fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    "verifier",
    [
        {"kind": "prm"},
        {"kind": "judge"},
        {"kind": "outcome", "model": "orm"},
        {"kind": "generative", "max_tokens": 16},
    ],
)
async def test_every_verifier_reads_a_history_with_calls(verifier: dict[str, Any]) -> None:
    """A message whose content is null, as all clients send it beside its calls, has a text for a verifier."""
    history = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    given = {"messages": [USER, *history], "verifier": verifier, "strategy": {"name": "best_of_n", "n": 4}, "seed": 1}
    outcome = await run_job(build_spec(given), Watching(), MemoryJournal())
    assert outcome.status == "completed"
    assert outcome.usage.verifier_computed > 0
