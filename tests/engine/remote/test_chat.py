"""The client of servers that only chat, against answers in the form of OpenAI's documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    NotSupported,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    TokenizeRequest,
    Tokens,
)
from engine.remote import retries
from engine.remote.chat import model_list
from engine.remote.chat.encoding import (
    Conversation,
    count_tokens,
    decode_prompt,
    decode_text,
    encode_prompt,
    encode_text,
)
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from tests.engine.remote.test_openai_faults import receive

MESSAGES = [{"role": "system", "content": "Häuser"}, {"role": "user", "content": "What is 3 + 4?"}]
Handler = Callable[[dict[str, Any]], httpx.Response]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_WAITS_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(model_list, "_LISTS", {})


class Hosted:
    """A chat server whose answers come from ``answer``; ``bodies`` are the requests that it got."""

    def __init__(self, answer: Handler, options: ChatOptions | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_lists = 0
        self.engine = HttpEngine("https://hosted/v1", api_key="k", dialect="chat", chat=options or ChatOptions(("m",)))
        connection = self.engine._connection

        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                self.num_lists += 1
                return httpx.Response(200, json={"data": [{"id": "m"}, {"id": "other"}]})
            assert request.url.path == "/v1/chat/completions"
            self.bodies.append(json.loads(request.content))
            return answer(self.bodies[-1])

        connection._http = httpx.AsyncClient(base_url="https://hosted", transport=httpx.MockTransport(handle))

    async def generate(self, *branches: Branch, prompt: Tokens | None = None, **law: Any) -> list[Completion]:
        request = GenerateRequest("r", "m", prompt or encode_prompt(MESSAGES), branches, SamplingParams(**law))
        events = [event async for event in self.engine.generate(request)]
        return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


def stream(*chunks: dict[str, Any], is_cut: bool = False) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, content="".join([*lines, *([] if is_cut else ["data: [DONE]\n\n"])]).encode())


def said(text: str, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}], "usage": None}


def usage(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


# Encoding.


@given(st.text(), st.integers(1, 50))
def test_tokens_hold_the_text_in_any_number(text: str, count: int) -> None:
    ids = encode_text(text, count)
    assert len(ids) == count
    assert decode_text(ids) == text


@given(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()})), st.text()
)
def test_a_conversation_and_the_beginning_of_its_answer_come_back(messages: list[dict[str, str]], answer: str) -> None:
    assert decode_prompt(encode_prompt(messages) + encode_text(answer)) == Conversation(messages, {}, answer, answer)


async def test_tokens_of_another_server_are_refused() -> None:
    hosted = Hosted(lambda _: stream())
    with pytest.raises(InvalidRequest, match="a server that only chats takes no token ids"):
        await hosted.generate(Branch(1, 1, 9), prompt=(5, 6))
    await hosted.engine.close()


@pytest.mark.parametrize(
    ("text", "reported", "billed"),
    [("", 0, 0), ("abc", 2, 2), ("abc", 90, 90), ("a" * 320, 1, 10), ("a" * 320, None, 80), ("", None, 0)],
)
def test_the_reported_number_of_tokens_is_billed_unless_it_is_impossible(
    text: str, reported: int | None, billed: int
) -> None:
    assert count_tokens(text, reported) == billed


# Generation.


async def test_an_answer_has_the_tokens_that_the_server_bills_with_its_hidden_reasoning() -> None:
    hidden = {"prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 30}}
    hosted = Hosted(lambda _: stream(said("The answer"), said(" is 7.", "stop"), usage(21, 35, **hidden)))
    [one] = await hosted.generate(Branch(1, 2, 100), temperature=0.5, stop=("END",))
    assert (one.text, len(one.token_ids), one.finish_reason) == ("The answer is 7.", 35, "stop")
    assert (one.prompt_tokens, one.cached_tokens) == (21, 16)
    assert decode_text(one.token_ids) == one.text
    [body] = hosted.bodies
    assert body["messages"] == MESSAGES
    assert (body["model"], body["temperature"], body["top_p"], body["stop"]) == ("m", 0.5, 1.0, ["END"])
    assert (body["max_completion_tokens"], body["stream_options"]) == (100, {"include_usage": True})
    assert not {"top_k", "n", "cache_salt", "max_tokens"} & set(body)
    await hosted.engine.close()


async def test_deltas_are_the_text_as_it_comes() -> None:
    hosted = Hosted(lambda _: stream(said("a"), said("b", "length"), usage(3, 2)))
    request = GenerateRequest("r", "m", encode_prompt("?"), (Branch(1, 1, 2),))
    events = [event async for event in hosted.engine.generate(request, stream=True)]
    assert [event.text for event in events if isinstance(event, Delta)] == ["a", "b"]
    assert hosted.bodies[0]["messages"] == [{"role": "user", "content": "?"}]
    await hosted.engine.close()


@pytest.mark.parametrize(
    ("prefill", "fields"),
    [
        ("last_message", {}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": False}),
        ("prefix", {}),
    ],
)
async def test_an_answer_goes_on_after_its_beginning_in_the_way_of_the_server(
    prefill: Any, fields: dict[str, Any]
) -> None:
    hosted = Hosted(lambda _: stream(said(" = 7", "stop"), usage(9, 3)), ChatOptions(("m",), prefill=prefill))
    [one] = await hosted.generate(Branch(1, 1, 9, encode_text("3 + 4")))
    assert one.text == " = 7"
    last = hosted.bodies[0]["messages"][-1]
    assert last.pop("prefix", False) == (prefill == "prefix")
    assert last == {"role": "assistant", "content": "3 + 4"}
    assert fields.items() <= hosted.bodies[0].items()
    [info] = await hosted.engine.models()
    steps = {"continuation"} if prefill == "continue_final_message" else set()
    assert info.capabilities == {"constraint", "penalties"} | steps
    await hosted.engine.close()


async def test_a_server_without_prefill_is_not_asked_to_go_on() -> None:
    hosted = Hosted(lambda _: stream())
    with pytest.raises(NotSupported, match=r"https://hosted \(chat\) cannot go on after the beginning of an answer"):
        await hosted.generate(Branch(1, 1, 9, encode_text("3 + 4")))
    assert not hosted.bodies
    await hosted.engine.close()


async def test_an_answer_that_has_ended_before_its_stream_breaks_is_complete() -> None:
    gone = {"error": {"message": "gone", "code": 503}}
    hosted = Hosted(lambda _: stream(said("7"), said(".", "stop"), gone))
    [one] = await hosted.generate(Branch(1, 1, 9))
    assert (one.text, one.finish_reason, len(one.token_ids)) == ("7.", "stop", 2)
    assert len(hosted.bodies) == 1
    await hosted.engine.close()


@pytest.mark.parametrize(("prefill", "text"), [("none", "new"), ("last_message", "oldnew")])
async def test_a_cut_stream_goes_on_or_begins_again_and_what_it_sent_is_billed(prefill: Any, text: str) -> None:
    answers = iter([stream(said("ol"), said("d"), is_cut=True), stream(said("new", "stop"), usage(9, 1))])
    hosted = Hosted(lambda _: next(answers), ChatOptions(("m",), prefill=prefill))
    [one] = await hosted.generate(Branch(1, 1, 9))
    assert (one.text, len(one.token_ids)) == (text, 3)
    assert [body["max_completion_tokens"] for body in hosted.bodies] == [9, 7]
    await hosted.engine.close()


async def test_rate_limits_are_retried_and_not_billed() -> None:
    limited = {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}}
    answers = iter(
        [
            httpx.Response(429, json=limited, headers={"Retry-After": "0"}),
            httpx.Response(500, json={"error": {"message": "The server had an error", "type": "server_error"}}),
            stream(said("7", "stop"), usage(9, 1)),
        ]
    )
    hosted = Hosted(lambda _: next(answers))
    [one] = await hosted.generate(Branch(1, 1, 9))
    assert (one.text, len(one.token_ids)) == ("7", 1)
    await hosted.engine.close()


async def test_a_long_rate_limit_is_left_to_the_job() -> None:
    hosted = Hosted(lambda _: httpx.Response(429, json={"error": {"message": "slow"}}, headers={"Retry-After": "60"}))
    with pytest.raises(EngineBusy) as caught:
        await hosted.generate(Branch(1, 1, 9))
    assert (caught.value.retry_after, len(hosted.bodies)) == (60, 1)
    await hosted.engine.close()


async def test_a_gateway_passes_the_wait_of_its_upstream_on_under_another_name() -> None:
    """LiteLLM's proxy does, also for the limits of its own models."""
    headers = {"llm_provider-retry-after": "60"}
    hosted = Hosted(lambda _: httpx.Response(429, json={"error": {"message": "slow"}}, headers=headers))
    with pytest.raises(EngineBusy) as caught:
        await hosted.generate(Branch(1, 1, 9))
    assert (caught.value.retry_after, len(hosted.bodies)) == (60, 1)
    await hosted.engine.close()


async def test_a_proxy_without_a_database_that_does_not_know_a_key_has_refused_it() -> None:
    """LiteLLM's proxy looks every key but its master key up in its database."""
    error = {"message": "No connected db.", "type": "no_db_connection", "param": None, "code": "400"}
    hosted = Hosted(lambda _: httpx.Response(400, json={"error": error}))
    with pytest.raises(EngineError, match=r"refused the request's API key .*api_key_env"):
        await hosted.generate(Branch(1, 1, 9))
    await hosted.engine.close()


async def test_a_failing_branch_does_not_lose_the_others() -> None:
    answers = iter([stream(said("7", "stop"), usage(9, 1)), *[httpx.Response(503, json={"error": "down"})] * 9])
    hosted = Hosted(lambda _: next(answers))
    request = GenerateRequest("r", "m", encode_prompt("?"), (Branch(1, 1, 9), Branch(1, 2, 9)))
    received, error = await receive(hosted.engine, request)
    assert type(error) is EngineUnavailable
    assert [one.text for one in received] == ["7"]
    await hosted.engine.close()


async def test_the_older_name_of_the_limit_is_used_where_the_newer_is_refused() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        if "max_completion_tokens" in body:
            return httpx.Response(400, json={"error": {"message": "unknown field max_completion_tokens"}})
        return stream(said("7", "stop"), usage(9, 1))

    hosted = Hosted(answer, ChatOptions(("m",), omit=frozenset({"seed"})))
    for _ in range(2):
        await hosted.generate(Branch(1, 1, 9))
    assert [body.get("max_tokens") for body in hosted.bodies] == [None, 9, 9]
    assert all("seed" not in body for body in hosted.bodies)
    await hosted.engine.close()


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ({"top_k": 3}, "cannot honour top_k"),
        ({"logprobs": 3}, "cannot honour logprobs"),
        ({"min_tokens": 1}, "min_tokens"),
    ],
)
async def test_unsupported_settings_are_named(law: dict[str, Any], message: str) -> None:
    hosted = Hosted(lambda _: stream())
    with pytest.raises(EngineError, match=message):
        await hosted.generate(Branch(1, 1, 9), **law)
    await hosted.engine.close()


async def test_the_stop_string_that_ended_an_answer_stays_in_its_text() -> None:
    ended = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "stop_reason": "\n\n"}]}
    hosted = Hosted(lambda _: stream(said("a step"), ended, usage(9, 3)))
    [one] = await hosted.generate(Branch(1, 1, 9), stop=("\n\n",))
    assert (one.text, one.stop, len(one.token_ids)) == ("a step\n\n", "\n\n", 3)
    await hosted.engine.close()


# Models.


async def test_the_configured_models_are_listed_and_the_list_is_asked_for_once() -> None:
    hosted = Hosted(lambda _: stream(), ChatOptions(("m",), context=1000))
    for _ in range(3):
        [info] = await hosted.engine.models()
    assert (info.id, info.context, info.isolates) == ("m", 1000, False)
    assert info.capabilities == {"constraint", "penalties"}
    assert hosted.num_lists == 1
    await hosted.engine.close()


async def test_a_model_that_the_server_does_not_list_is_named() -> None:
    hosted = Hosted(lambda _: stream(), ChatOptions(("absent",)))
    with pytest.raises(EngineError, match="does not list the model 'absent'; it lists m, other"):
        await hosted.engine.models()
    await hosted.engine.close()


# Judging.


def verdict(text: str, top: dict[str, float] | None = None) -> httpx.Response:
    choice: dict[str, Any] = {"message": {"content": text}}
    if top is not None:
        likeliest = [{"token": token, "logprob": value} for token, value in top.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": likeliest}]}
    return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 30, "completion_tokens": 1}})


async def judge(hosted: Hosted) -> tuple[float, ...]:
    verdicts = [(await hosted.engine.tokenize(TokenizeRequest("m", word, special=False)))[0] for word in ("Yes", "No")]
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", MESSAGES))
    [result] = await hosted.engine.score(ScoreRequest("s", "m", (ScoreItem((prompt,), (0,)),), tuple(verdicts)))
    assert result.values is not None
    assert result.computed_tokens == 31
    return result.values[0]


async def test_a_judge_reads_the_log_probabilities_of_its_verdicts() -> None:
    hosted = Hosted(lambda _: verdict("Yes", {"Yes": -0.25, " No": -1.5, "Maybe": -9.0}))
    assert await judge(hosted) == (-0.25, -1.5)
    assert hosted.bodies[0]["messages"] == MESSAGES
    await hosted.engine.close()


async def test_a_judge_without_log_probabilities_is_taken_at_its_word() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        if "logprobs" in body:
            return httpx.Response(400, json={"error": {"message": "m does not support logprobs", "param": "logprobs"}})
        return verdict("No, the second step is wrong.")

    hosted = Hosted(answer)
    yes, no = await judge(hosted)
    assert no > yes + 20
    await judge(hosted)
    assert len(hosted.bodies) == 3
    await hosted.engine.close()
