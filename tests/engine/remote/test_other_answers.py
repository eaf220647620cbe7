"""Answers of servers in other forms than OpenAI's documentation shows: what is read, and what is named and retried."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.protocol.thoughts import DELIMITERS
from engine.protocol.types import (
    Branch,
    Completion,
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
    InvalidRequest,
    TokenizeRequest,
)
from engine.remote.chat.encoding import encode_prompt
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from tests.engine.helpers import generate
from tests.engine.remote.test_chat import Hosted, fresh, said, stream, usage
from tests.engine.remote.test_openai_compatible import collect, scripted

__all__ = ["fresh"]  # the fixture holds here, too

BEGINNING = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
SSE = "text/event-stream"
HTML = b"<!doctype html><html><body>Sign in to the network</body></html>"


def answer(content: bytes | str, kind: str | None = SSE) -> httpx.Response:
    data = content.encode() if isinstance(content, str) else content
    return httpx.Response(200, content=data, headers={} if kind is None else {"content-type": kind})


def chosen(text: str, reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": [7], "finish_reason": reason}]}


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


OTHERS = {
    "a page": (answer(HTML, "text/html; charset=utf-8"), "not an OpenAI completion: content-type text/html"),
    "a page as a stream": (answer(HTML), "not an OpenAI completion: content-type text/event-stream, and no event"),
    "nothing": (answer(""), "content-type text/event-stream, and no event"),
    "nothing without a type": (answer("", None), "not an OpenAI completion: content-type none"),
    "cut JSON": (answer('{"choices": [{"mess', "application/json"), "is not JSON: content-type application/json"),
    "a list": (answer("[]", "application/json"), "one of its events is list instead of an object"),
    "another object": (answer('{"object": "list", "data": []}', "application/json"), "no 'choices', but 'data'"),
    "an event cut short": (answer('data: {"choices": [{"del'), "one of its events is not JSON"),
    "an event of no JSON": (answer("data: hello\n\n"), "one of its events is not JSON"),
    "a number": (answer("data: 5\n\n"), "one of its events is int instead of an object"),
    "null": (answer("data: null\n\n"), "one of its events is NoneType instead of an object"),
    "no choices": (answer(event({"object": "ping"}) + "data: [DONE]\n\n"), "no 'choices', but 'object'"),
    "empty choices": (answer(event({"choices": []}) + "data: [DONE]\n\n"), "no 'choices', but 'choices'"),
    "choices of another kind": (answer(event({"choices": "7"})), "'choices' are no list of objects"),
    "a choice of another kind": (answer(event({"choices": [7]})), "'choices' are no list of objects"),
    "content that is a number": (answer(event({"choices": [{"delta": {"content": 7}}]})), "its content is int"),
    "parts of another kind": (answer(event({"choices": [{"delta": {"content": [7]}}]})), "its content is int"),
    "a delta of another kind": (answer(event({"choices": [{"delta": "7"}]})), "not an OpenAI completion: AttributeErr"),
    "usage of another kind": (answer(event({"choices": [], "usage": 7})), "its 'usage' is no object"),
    "an error as an answer": (answer(event({"error": {"message": "upstream"}})), "upstream"),
    "an error with status 200": (
        answer('{"error": {"message": "upstream"}}', "application/json"),
        "upstream",
    ),
    "an end of its own": (answer(event(said("7", "eaten"))), "ended an answer with 'eaten'"),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_an_answer_of_another_form_is_named_and_a_passing_failure(name: str) -> None:
    response, message = OTHERS[name]
    hosted = Hosted(lambda _: answer(response.content, response.headers.get("content-type")))
    with pytest.raises(EngineUnavailable) as caught:
        await hosted.generate(Branch(1, 1, 9))
    assert message in str(caught.value)
    assert len(hosted.bodies) == 4  # after waits
    await hosted.engine.close()


@pytest.mark.parametrize("name", [name for name in OTHERS if "content" not in name and "delta" not in name])
async def test_so_it_is_where_texts_are_completed(name: str) -> None:
    response, _ = OTHERS[name]
    client = scripted("vllm", lambda _: answer(response.content, response.headers.get("content-type")))
    with pytest.raises(EngineUnavailable):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    await client.close()


async def test_a_list_of_models_of_another_form_is_a_passing_failure() -> None:
    for value in ({"object": "list"}, {"data": [7]}, [], {"data": None}):
        engine = HttpEngine("https://hosted", dialect="chat", chat=ChatOptions(("m",)))
        transport = httpx.MockTransport(lambda _, value=value: httpx.Response(200, json=value))  # type: ignore[misc]
        engine._connection._http = httpx.AsyncClient(base_url="https://hosted", transport=transport)
        with pytest.raises(EngineUnavailable, match="did not answer /v1/models with a list of models"):
            await engine.models()
        await engine.close()


@pytest.mark.parametrize("value", [{"object": "list"}, {"data": [7]}, [], {"data": None}])
async def test_a_server_of_an_unknown_kind_with_such_a_list_is_one_too(value: Any) -> None:
    engine = HttpEngine("https://hosted")
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=value))
    engine._connection._http = httpx.AsyncClient(base_url="https://hosted", transport=transport)
    with pytest.raises(EngineUnavailable, match="did not answer /v1/models with a list of models"):
        await engine.models()
    await engine.close()


@pytest.mark.parametrize("value", [{}, [], {"tokens": None}, {"tokens": ["a"]}, {"tokens": 7}])
async def test_tokens_of_another_form_are_a_passing_failure(value: Any) -> None:
    client = scripted("vllm", lambda _: httpx.Response(200, json=value))
    with pytest.raises(EngineUnavailable, match="did not answer /tokenize with tokens"):
        await client.tokenize(TokenizeRequest("m", "text"))
    await client.close()


# A stream from which nothing comes.


@pytest.mark.parametrize("pieces", [[], [BEGINNING], "comments"])
async def test_a_server_that_sends_nothing_is_left_after_its_silence(pieces: Any) -> None:
    num_requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        num_requests += 1
        await reader.readuntil(b"\r\n\r\n")
        for piece in (
            [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"] if pieces == "comments" else pieces
        ):
            writer.write(piece)
        try:
            while pieces == "comments":
                writer.write(b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.02)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = ChatOptions(("m",))
        engine = HttpEngine(f"http://127.0.0.1:{port}", dialect="chat", chat=options, silence_seconds=0.3)
        request = generate(encode_prompt("?"), [Branch(1, 1, 9)])
        with pytest.raises(EngineUnreachable, match=r"has sent nothing for 0.3 s"):
            await collect(engine, request)
        await engine.close()
        assert num_requests == 1  # another attempt would take as long


# Other forms that are read.


async def one_of(response: httpx.Response) -> Completion:
    hosted = Hosted(lambda _: response)
    [one] = await hosted.generate(Branch(1, 1, 100))
    await hosted.engine.close()
    return one


def split(one: Completion) -> tuple[str, str]:
    assert one.thought is not None
    return one.text[: one.thought[0]], one.text[one.thought[0] :]


PARTS = {
    "text": ([{"type": "text", "text": "It is 7."}], False),
    "texts": (["It is ", {"type": "output_text", "text": "7."}], False),
    "thinking": ([{"type": "thinking", "thinking": "3 + 4"}, {"type": "text", "text": "It is 7."}], True),
    "thinking in parts": (
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "3 "}, {"type": "text", "text": "+ 4"}]},
            {"type": "text", "text": "It is 7."},
        ],
        True,
    ),
    "reasoning": ([{"type": "reasoning", "text": "3 + 4"}, {"type": "text", "text": "It is 7."}], True),
    "a summary": (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "3 + 4"}]},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": {"value": "It is 7.", "annotations": []}},
        ],
        True,
    ),
    "a refusal": ([{"type": "refusal", "refusal": "It is 7."}], False),
    "one part alone": ({"type": "text", "text": "It is 7."}, False),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_content_in_parts_is_read_with_its_thought(name: str, is_stream: bool) -> None:
    content, thinks = PARTS[name]
    if is_stream:
        parts = content if isinstance(content, list) else [content]
        chunks = [said("", None, content=[part]) for part in parts]
        response = stream(*chunks, said("", "stop"), usage(9, 20))
    else:
        message = {"role": "assistant", "content": content}
        whole = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 20}}
        response = httpx.Response(200, json=whole)
    one = await one_of(response)
    assert split(one) == ("<think>\n3 + 4\n</think>\n\n" if thinks else "", "It is 7.")
    assert (one.finish_reason, len(one.token_ids)) == ("stop", 20)


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_content": "3 + 4"},
        {"reasoning": {"content": "3 + 4"}},
        {"thinking": "3 + 4"},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "3 + 4"},
                {"type": "reasoning.encrypted", "data": "x"},
            ]
        },
        {"reasoning": "3 + 4", "reasoning_details": [{"type": "reasoning.summary", "summary": "3 + 4"}]},
    ],
)
async def test_a_thought_apart_is_read_in_the_fields_of_all_servers(field: dict[str, Any]) -> None:
    one = await one_of(stream(said("", None, **field), said("It is 7.", "stop"), usage(9, 20)))
    assert split(one) == ("<think>\n3 + 4\n</think>\n\n", "It is 7.")


async def test_a_refusal_in_a_field_of_its_own_is_the_text() -> None:
    one = await one_of(stream(said("", "stop", content=None, refusal="I can't help."), usage(9, 5)))
    assert (one.text, one.finish_reason) == ("I can't help.", "stop")


@pytest.mark.parametrize("pair", DELIMITERS)
async def test_a_thought_within_the_content_is_found_in_every_form(pair: tuple[str, str]) -> None:
    opening, closing = pair
    whole = f"{opening}3 + 4{closing}\n\nIt is 7, by {closing}."
    one = await one_of(stream(said(whole[:5]), said(whole[5:], "stop"), usage(9, 40)))
    assert split(one) == (f"{opening}3 + 4{closing}\n\n", f"It is 7, by {closing}.")


@pytest.mark.parametrize(
    "content",
    [
        f"\ufeff{event(said('7', 'stop'))}",
        event(said("7", "stop")).rstrip(),  # no line end at the end of the stream
        event(said("7", "stop")).replace("\n", "\r\n"),
        f"event: message\nid: 1\n{event(said('7', 'stop'))}",
        event({**said("7", "stop"), "error": None}),
        event({"choices": [{"delta": {"content": "7"}, "finish_reason": "STOP"}]}),
    ],
)
async def test_a_stream_is_read_in_the_forms_of_other_servers(content: str) -> None:
    one = await one_of(answer(content))
    assert (one.text, one.finish_reason) == ("7", "stop")


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", None])
async def test_events_of_a_stream_with_another_type_are_read(kind: str | None) -> None:
    assert (await one_of(answer(event(said("7", "stop")), kind))).text == "7"


# Refusals.


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
async def test_one_refused_branch_ends_with_the_servers_words(status: int) -> None:
    error = {"message": "flagged by the moderation of this model", "type": "x", "param": "messages", "code": "y"}
    answers = iter([stream(said("7", "stop"), usage(9, 1)), httpx.Response(status, json={"error": error})])
    hosted = Hosted(lambda _: next(answers))
    whole, refused = await hosted.generate(Branch(1, 1, 9), Branch(1, 2, 9))
    assert (whole.text, whole.finish_reason) == ("7", "stop")
    assert (refused.finish_reason, refused.text, refused.token_ids) == ("refused", "", ())
    assert refused.refusal is not None
    assert "flagged by the moderation" in refused.refusal.message
    await hosted.engine.close()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_where_all_branches_are_refused_that_is_an_error(status: int) -> None:
    hosted = Hosted(lambda _: httpx.Response(status, json={"error": {"message": "no such thing here"}}))
    with pytest.raises(EngineError, match="no such thing here") as caught:
        await hosted.generate(Branch(1, 1, 9), Branch(1, 2, 9))
    assert not isinstance(caught.value, EngineUnavailable)
    await hosted.engine.close()


FILTERS = [
    *("content_filter", "content_filtered", "SAFETY", "refusal", "sensitive", "RECITATION", "BLOCKLIST", "SPII"),
    *("PROHIBITED_CONTENT", "guardrail_intervened"),
]


@pytest.mark.parametrize("reason", FILTERS)
async def test_an_answer_that_a_filter_cut_off_is_refused_and_billed(reason: str) -> None:
    one = await one_of(stream(said("It is", None), said("", reason), usage(9, 12)))
    assert (one.finish_reason, one.text, len(one.token_ids)) == ("refused", "It is", 12)
    assert one.refusal is not None
    assert (reason in one.refusal.message, one.refusal.kind) == (True, "filtered")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence", "COMPLETE"), "stop"),
        (("tool_calls", "tool_use", "function_call"), "stop"),
        (("length", "MAX_TOKENS", "max_tokens", "model_length"), "length"),
        (("model_context_window_exceeded",), "context"),
    ],
)
async def test_the_words_of_other_servers_for_an_end_are_read(words: tuple[str, ...], expected: str) -> None:
    for word in words:
        assert (await one_of(stream(said("7", word), usage(9, 9)))).finish_reason == expected, word
        client = scripted("vllm", lambda _, word=word: answer(event(chosen("7", word))))  # type: ignore[misc]
        (one,) = await collect(client, generate((5, 6), [Branch(1, 1, 1)]))
        assert one.finish_reason == expected, word
        await client.close()


@pytest.mark.parametrize("word", ["abort", "error", "network_error", "insufficient_system_resource"])
async def test_the_words_of_a_failure_are_no_end_of_an_answer(word: str) -> None:
    hosted = Hosted(lambda _: stream(said("7", word)))
    with pytest.raises(EngineUnavailable, match=f"ended an answer with '{word}'"):
        await hosted.generate(Branch(1, 1, 9))
    await hosted.engine.close()


@pytest.mark.parametrize("going_on", [None, "", "null"])
async def test_a_part_without_a_reason_does_not_end_an_answer(going_on: str | None) -> None:
    one = await one_of(stream(said("7", going_on), said("8", "stop"), usage(9, 2)))
    assert (one.text, one.finish_reason) == ("78", "stop")


async def test_an_error_in_the_middle_of_an_answer_keeps_what_was_paid_for() -> None:
    error = {"error": {"message": "blocked", "code": 400}}
    answers = iter([stream(said("7", "stop"), usage(9, 1)), answer(event(said("It is")) + event(error))])
    hosted = Hosted(lambda _: next(answers))
    whole, refused = await hosted.generate(Branch(1, 1, 9), Branch(1, 2, 9))
    assert (whole.text, refused.text, refused.finish_reason, len(refused.token_ids)) == ("7", "It is", "refused", 1)
    with pytest.raises(InvalidRequest, match="blocked"):
        await Hosted(lambda _: answer(event(error))).generate(Branch(1, 1, 9))
    await hosted.engine.close()
