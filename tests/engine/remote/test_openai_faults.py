"""Refusals, interruptions and oddities of OpenAI-compatible servers, from the answers of a real vLLM 0.32."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.protocol.types import (
    Branch,
    Completion,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    NotSupported,
    ScoreItem,
    TokenizeRequest,
)
from engine.remote import retries
from engine.remote.branches.stream import branch_seed
from engine.remote.connection import Connection
from engine.remote.health import warn_once
from engine.remote.http import HttpEngine
from tests.engine.helpers import generate, score
from tests.engine.remote.test_openai_compatible import Handler, chunks, collect, piece, scripted


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_WAITS_SECONDS", (0.0, 0.0, 0.0))


def siblings(count: int, max_tokens: int = 9) -> list[Branch]:
    return [Branch(1, 100 + index, max_tokens, (), (5, index)) for index in range(count)]


def usage(prompt: int, cached: int = 0) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}}


def recorded(handler: Handler) -> tuple[list[dict[str, Any]], Handler]:
    """Return the list of the bodies that the handler will have got, and the handler that adds to it."""
    bodies: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return handler(request)

    return bodies, handle


async def receive(engine: HttpEngine, request: GenerateRequest) -> tuple[list[Completion], EngineError | None]:
    """Return the completions that arrive, and the error that ends the request."""
    received: list[Completion] = []
    try:
        async for event in engine.generate(request):
            assert isinstance(event, Completion)
            received.append(event)
    except EngineError as error:
        return received, error
    return received, None


async def test_every_setting_is_sent_since_the_server_has_defaults_of_its_own() -> None:
    bodies, handle = recorded(lambda _: chunks(piece("a", [7], finish_reason="length")))
    client = scripted("vllm", handle)
    await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    sent = {name: bodies[0][name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    assert sent == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    await client.close()


async def test_siblings_are_one_request_whose_last_branch_bills_the_prompt() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return chunks(
            piece("b", [8]),
            {"choices": [{"index": 2, "text": "c", "token_ids": [9], "finish_reason": "stop", "stop_reason": 3}]},
            {"choices": [{"index": 1, "text": "d", "token_ids": [4], "finish_reason": "length"}]},
            piece("e", [5], finish_reason="length"),
            usage(3, 2),
        )

    bodies, handle = recorded(answer)
    client = scripted("vllm", handle)
    branches = siblings(3)
    received, error = await receive(client, generate((5, 6, 7), branches))
    assert error is None
    assert [(one.index, one.token_ids, one.cached_tokens) for one in received] == [
        (2, (9,), 2),
        (1, (4,), 2),
        (0, (8, 5), 2),
    ]
    [body] = bodies
    assert (body["n"], body["seed"]) == (3, branch_seed(branches[0]))
    assert [branch_seed(branch) - body["seed"] for branch in branches] == [0, 1, 2]
    await client.close()


async def test_branches_with_other_lengths_or_gaps_between_seeds_have_requests_of_their_own() -> None:
    bodies, handle = recorded(lambda _: chunks(piece("a", [7], finish_reason="length")))
    client = scripted("vllm", handle)
    first, second, third, fourth = siblings(4)
    others = [Branch(1, 100, 4, (), (5, 1)), Branch(1, 100, 9, (3,), (5, 2)), Branch(1, 7, 9)]
    await collect(client, generate((5, 6), [first, *others, fourth]))
    assert all("n" not in body for body in bodies)
    assert len(bodies) == 5
    sglang = scripted("sglang", handle)
    bodies.clear()
    await collect(sglang, generate((5, 6), [first, second, third]))
    assert [body.get("n") for body in bodies] == [None] * 3
    await client.close()
    await sglang.close()


GONE = {"error": {"message": "gone", "code": 503}}


async def test_a_branch_that_has_ended_before_its_stream_breaks_is_complete() -> None:
    ended = piece("ab", [7, 8], finish_reason="stop", stop_reason=8)
    second = {"choices": [{"index": 1, "text": "d", "token_ids": [4], "finish_reason": None}]}
    answers = iter([chunks(ended, GONE), chunks(ended, second, GONE), chunks(piece("e", [5], finish_reason="length"))])
    bodies, handle = recorded(lambda _: next(answers))
    client = scripted("vllm", handle)
    [one], error = await receive(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert (one.text, one.token_ids, one.finish_reason, error) == ("ab", (7, 8), "stop", None)
    assert len(bodies) == 1
    (first, other), error = await receive(client, generate((5, 6), siblings(2)))
    assert ((first.token_ids, first.finish_reason), error) == (((7, 8), "stop"), None)
    assert (other.index, other.token_ids, other.finish_reason) == (1, (4, 5), "length")
    assert (bodies[2]["prompt"], "n" in bodies[2]) == ([5, 6, 4], False)
    await client.close()


@pytest.mark.parametrize("details", [7, "7", [7]])
async def test_usage_of_another_form_is_a_passing_failure(details: Any) -> None:
    report = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens_details": details}}
    answers = iter([chunks(piece("ab", [7, 8]), report), chunks(piece("c", [9], finish_reason="length"))])
    client = scripted("vllm", lambda _: next(answers))
    [one], error = await receive(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert (one.token_ids, error) == ((7, 8, 9), None)
    await client.close()


async def test_the_only_sample_may_have_any_number() -> None:
    client = scripted("vllm", lambda _: chunks(piece("ab", [7, 8], finish_reason="length", index=3)))
    [one], error = await receive(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert (one.token_ids, error) == ((7, 8), None)
    await client.close()


async def test_a_cut_stream_goes_on_after_what_has_arrived() -> None:
    answers = iter(
        [
            chunks(piece("ab", [7, 8], -0.5), piece("c", [9], -0.5)),
            httpx.Response(503, json={"error": {"message": "overloaded", "code": 503}}),
            chunks(piece("d", [4], -1.0, finish_reason="stop", stop_reason=2), usage(5, 4)),
        ]
    )
    bodies, handle = recorded(lambda _: next(answers))
    client = scripted("vllm", handle)
    [one], error = await receive(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert error is None
    assert (one.token_ids, one.text, one.finish_reason, one.stop) == ((7, 8, 9, 4), "abcd", "stop", 2)
    assert (one.logprob, one.prompt_tokens) == (-2.0, 2)
    assert [(body["prompt"], body["max_tokens"]) for body in bodies] == [
        ([5, 6], 9),
        ([5, 6, 7, 8, 9], 6),
        ([5, 6, 7, 8, 9], 6),
    ]
    await client.close()


async def test_one_failing_branch_loses_neither_its_siblings_nor_its_own_tokens() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        if prompt[-1] == 1:
            return chunks(piece("x", [3]))
        if 3 in prompt:
            return httpx.Response(503, json={"error": "overloaded"})
        return chunks(piece("ok", [7, 8], finish_reason="length"))

    client = scripted("vllm", answer)
    branches = [Branch(1, index, 2, (index,)) for index in (0, 1, 2, 4)]
    received, error = await receive(client, generate((5, 6), branches))
    assert type(error) is EngineUnavailable
    assert {one.index: one.token_ids for one in received} == {0: (7, 8), 1: (3,), 2: (7, 8), 3: (7, 8)}
    assert {one.finish_reason for one in received} == {"length"}
    await client.close()


async def test_a_refusal_inside_a_stream_is_final() -> None:
    error = {"message": "Token id 99 is out of vocabulary", "type": "BadRequestError", "param": None, "code": 400}
    bodies, handle = recorded(lambda _: chunks({"error": error}))
    client = scripted("vllm", handle)
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert len(bodies) == 1
    await client.close()


async def test_more_stop_strings_than_a_vllm_takes_are_refused_with_its_setting() -> None:
    # The words of vLLM 0.32.
    message = (
        "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string'}\n"
        "  {'type': 'too_long', 'loc': 'body.stop', 'msg': 'List should have at most 4 items after validation, not 6'}"
    )
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    client = scripted("vllm", lambda _: httpx.Response(400, json={"error": error}))
    stops = (". ", ".\n", "? ", "?\n", "! ", "!\n")
    with pytest.raises(InvalidRequest, match="start it with VLLM_MAX_STOP_STRINGS=6, or choose 'steps'"):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)], stop=stops))
    await client.close()


@pytest.mark.parametrize(
    ("response", "expected", "message"),
    [
        (httpx.Response(429, json={"error": {"message": "slow down"}}), EngineBusy, "slow down"),
        (
            httpx.Response(401, json={"error": "Unauthorized"}),
            EngineError,
            r"API key \(401: Unauthorized\): set the key",
        ),
        (httpx.Response(403, json={"detail": "no"}), EngineError, "http://foreign refused the request's API key"),
        (httpx.Response(404, json={"detail": "Not Found"}), NotSupported, "http://foreign has no such function"),
        (
            httpx.Response(404, json={"error": {"message": "The model `m` does not exist.", "code": 404}}),
            InvalidRequest,
            "does not exist",
        ),
        (httpx.Response(408, json={"error": "late"}), EngineUnavailable, "late"),
        (httpx.Response(409, json={"error": "loading"}), EngineUnavailable, "loading"),
        (httpx.Response(425, json={"error": "early"}), EngineUnavailable, "early"),
        (httpx.Response(413, content=b"<html>"), InvalidRequest, "http://foreign refused the request with status 413"),
        (httpx.Response(502, content=b"<html>"), EngineUnavailable, "http://foreign answered with status 502"),
    ],
)
async def test_each_status_has_its_own_meaning_with_the_servers_words(
    response: httpx.Response, expected: type[EngineError], message: str
) -> None:
    client = scripted("vllm", lambda _: response)
    with pytest.raises(expected, match=message) as caught:
        await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert type(caught.value) is expected
    await client.close()


@pytest.mark.parametrize(("header", "least", "most"), [("7", 7, 7), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0)])
async def test_the_time_of_a_rate_limit_is_reported(header: str, least: float, most: float) -> None:
    limited = httpx.Response(429, json={"error": {"message": "slow"}}, headers={"Retry-After": header})
    with pytest.raises(EngineBusy) as caught:
        await Connection("http://foreign")._parse(limited, limited.content)
    assert least <= (caught.value.retry_after or 0) <= most


@pytest.mark.parametrize(("wait", "calls"), [("0", 4), ("11", 1)])
async def test_a_rate_limit_is_waited_for_unless_it_is_long(wait: str, calls: int) -> None:
    limited = httpx.Response(429, json={"error": {"message": "slow"}}, headers={"Retry-After": wait})
    bodies, handle = recorded(lambda _: limited)
    client = scripted("vllm", handle)
    with pytest.raises(EngineBusy):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert len(bodies) == calls
    await client.close()


@pytest.mark.parametrize("url", ["http://foreign", "http://foreign/v1", "http://foreign/v1/"])
async def test_the_key_is_sent_and_a_url_may_end_as_clients_of_openai_have_it(url: str) -> None:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]})

    client = HttpEngine(url, api_key="sk-secret")
    http = client._connection._http
    client._connection._http = httpx.AsyncClient(
        base_url=http.base_url, headers=http.headers, transport=httpx.MockTransport(handle)
    )
    await client.models()
    assert {str(request.url) for request in asked} == {"http://foreign/v1/models", "http://foreign/health"}
    assert {request.headers["Authorization"] for request in asked} == {"Bearer sk-secret"}
    await client.close()
    await http.aclose()


async def test_a_server_whose_engine_has_died_lists_no_models() -> None:
    """vLLM goes on listing them for seconds, and its health is 503 without a body."""
    client = scripted("vllm", lambda _: httpx.Response(200, json={"tokens": [1]}))
    await client.tokenize(TokenizeRequest("m", "a"))
    healthy = client._connection._http

    def handle(request: httpx.Request) -> httpx.Response:
        listed = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]}
        return httpx.Response(503) if request.url.path == "/health" else httpx.Response(200, json=listed)

    client._connection._http = httpx.AsyncClient(base_url="http://foreign", transport=httpx.MockTransport(handle))
    with pytest.raises(EngineUnavailable, match="foreign"):
        await client.models()
    await client.close()
    await healthy.aclose()


@pytest.mark.parametrize(("details", "warns"), [(None, True), ({"cached_tokens": 0}, False)])
async def test_a_vllm_that_does_not_tell_cached_tokens_is_named_once(
    details: dict[str, int] | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": details}
    warn_once.cache_clear()
    client = scripted(
        "vllm", lambda _: chunks(piece("a", [7], finish_reason="length"), {"choices": [], "usage": usage})
    )
    for _ in range(2):
        await collect(client, generate((5, 6), [Branch(1, 1, 1)], model="m"))
    assert [record.message.count("--enable-prompt-tokens-details") for record in caplog.records] == [1] * warns
    await client.close()


async def test_verdicts_of_a_judge_are_read_even_if_they_are_unlikely() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        top = {"token_id:7": -12.5, "token_id:8": -13.0}
        return httpx.Response(
            200, json={"choices": [{"logprobs": {"top_logprobs": [top]}}], "usage": {"prompt_tokens": 2}}
        )

    bodies, handle = recorded(answer)
    client = scripted("vllm", handle)
    [result] = await client.score(score(ScoreItem(((5, 6),), (0,)), token_ids=(7, 8)))
    assert result.values == ((-12.5, -13.0),)
    assert (bodies[0]["logprob_token_ids"], bodies[0]["logprobs"]) == ([7, 8], 20)
    await client.close()


async def test_grades_that_a_server_does_not_list_have_no_probability() -> None:
    """Else eighteen bounds of 0.04 were a middling grade, where the model most likely writes something else."""
    shares = {"token_id:1": 0.8, "token_id:2": 0.1, "token_id:7": 0.05, "token_id:8": 0.04}
    top = {name: math.log(share) for name, share in shares.items()}
    listed = {"choices": [{"logprobs": {"top_logprobs": [top]}}], "usage": {"prompt_tokens": 2}}
    client = scripted("vllm", lambda _: httpx.Response(200, json=listed))
    asked = score(ScoreItem(((5, 6),), (0,)), token_ids=tuple(range(7, 27)))
    [grades], [bounds] = await client.score(replace(asked, normalized=True)), await client.score(asked)
    assert grades.values is not None
    assert bounds.values is not None
    [row], [others] = grades.values, bounds.values
    assert row[:2] == others[:2]
    assert math.fsum(map(math.exp, row)) == pytest.approx(0.09)
    assert {*others[2:]} == {math.log(0.04)}
    await client.close()


async def test_log_probabilities_of_the_likeliest_tokens_are_read() -> None:
    logprobs = {
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:8": -1.5, "token_id:7": -0.5}],
        "tokens": ["token_id:7"],
    }
    client = scripted("vllm", lambda _: chunks(piece("a", [7], finish_reason="length", logprobs=logprobs)))
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 1)], logprobs=2))
    assert one.logprobs is not None
    [token] = one.logprobs
    assert (token.token_id, token.logprob, token.top) == (7, -0.5, ((7, -0.5), (8, -1.5)))
    await client.close()


async def test_the_text_keeps_the_rest_of_the_token_in_which_a_stop_string_ends() -> None:
    logprobs = {"token_logprobs": [-0.5, -0.5], "tokens": ["a", ".\n\nSo"]}
    stopped = piece("a.\n\n", [7, 8], finish_reason="stop", stop_reason="\n\n", logprobs=logprobs)
    client = scripted("vllm", lambda _: chunks(stopped))
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 9)], stop=("\n\n",)))
    assert (one.text, one.token_ids, one.stop) == ("a.\n\nSo", (7, 8), "\n\n")
    await client.close()


async def test_more_tokens_than_asked_for_are_an_error() -> None:
    client = scripted("vllm", lambda _: chunks(piece("abc", [7, 8, 9], finish_reason="length")))
    received, error = await receive(client, generate((5, 6), [Branch(1, 1, 2)]))
    assert "sent 3 tokens where at most 2 were asked for" in str(error)
    assert [one.token_ids for one in received] == [(7, 8, 9)]
    await client.close()


async def test_a_cleared_cache_is_one_with_another_salt() -> None:
    bodies, handle = recorded(lambda _: chunks(piece("a", [7], finish_reason="length")))
    client = scripted("vllm", handle)
    request = generate((5, 6), [Branch(1, 1, 9)], cache_salt="ann")
    for _ in range(2):
        await collect(client, request)
        await client.clear_cache()
    await collect(client, request)
    salts = [body["cache_salt"] for body in bodies]
    assert salts[0] == "ann"
    assert len(set(salts)) == 3
    await client.close()


async def test_checkpoints_under_one_name_are_told_apart_by_their_root() -> None:
    infos = []
    for root in ("/models/one", "/models/two"):
        entry = {"id": "m", "owned_by": "vllm", "max_model_len": 512, "root": root}
        client = HttpEngine("http://foreign")
        answer = httpx.Response(200, json={"data": [entry]})
        client._connection._http = httpx.AsyncClient(
            base_url="http://foreign", transport=httpx.MockTransport(lambda _, answer=answer: answer)
        )
        infos += await client.models()
        await client.close()
    assert infos[0] != infos[1]


async def test_a_refused_branch_ends_alone_and_all_of_them_are_an_error() -> None:
    answers = iter(
        [chunks(piece("a", [7], finish_reason="length")), *[httpx.Response(400, json={"detail": "full"})] * 3]
    )
    client = scripted("vllm", lambda _: next(answers))
    request = generate((5, 6), [Branch(1, 1, 9), Branch(1, 2, 9)])
    whole, refused = sorted(await collect(client, request), key=lambda one: one.index)
    assert (whole.text, whole.finish_reason) == ("a", "length")
    assert (refused.finish_reason, refused.token_ids) == ("refused", ())
    assert refused.refusal is not None
    assert "full" in refused.refusal.message
    with pytest.raises(InvalidRequest, match="full"):
        await collect(client, request)
    await client.close()
