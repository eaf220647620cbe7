"""OpenAI's request fields: their effect on the job, and refusals by name in OpenAI's error format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from api.conversation.unsupported import Unsupported
from api.openai.unsupported import CHAT, RESPONSES
from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner.admission.effort import DEFAULT_EFFORTS
from tests.api.conftest import serving
from tests.api.openai_client import MODEL, QUESTION, address, ai, http, job_of, worker, working
from tests.scripted import ScriptedEngine
from workers.config.rate_limits import LimitsTable
from workers.config.settings import Settings, load_settings
from workers.store.jobs import JobStore

__all__ = ["address", "ai", "http", "worker"]

CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
RESPONSE_BODY: dict[str, Any] = {"model": MODEL, "input": "1 + 1?", "background": True}
LOW = DEFAULT_EFFORTS["low"]


async def spec_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Return the specification of the job behind a response with these fields."""
    response = await client.post("/v1/responses", json=RESPONSE_BODY | fields)
    assert response.status_code == 200, response.text
    job = await client.get(f"/v1/jobs/{job_of(response.json()['id'])}")
    return dict(job.json()["spec"])


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_output_tokens": 70}, 70),
        ({"reasoning": {"max_tokens": 71}}, 71),
        ({"thinking": {"type": "enabled", "budget_tokens": 72}}, 72),
        ({"budget": {"tokens": 73}}, 73),
        ({"max_output_tokens": 90, "budget": {"tokens": 80}, "reasoning": {"max_tokens": 85}}, 80),
        ({"max_output_tokens": 90, "budget": {"tokens": 88}, "reasoning": {"max_tokens": 85}}, 85),
        ({"max_output_tokens": 90, "budget": {"seconds": 5}}, 90),
        ({"reasoning": {"effort": "low"}}, LOW.tokens),
        ({"budget": {"effort": "low"}}, LOW.tokens),
        ({"reasoning": {"effort": "low"}, "max_output_tokens": 100}, 100),
        ({"reasoning": {"effort": "low"}, "max_output_tokens": 1_000_000}, LOW.tokens),
    ],
)
async def test_the_smallest_bound_holds(client: httpx.AsyncClient, fields: dict[str, Any], tokens: int) -> None:
    assert (await spec_of(client, **fields))["budget"]["tokens"] == tokens


async def test_bounds_of_a_chat_are_the_same(
    client: httpx.AsyncClient, ai: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    for field in ("max_completion_tokens", "max_tokens"):
        stream = await ai.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, reasoning_effort="low", extra_body={field: 123}
        )
        first = await anext(aiter(stream))
        spec = (await http.get(f"/v1/jobs/{job_of(first.id)}")).json()["spec"]
        assert (spec["budget"]["tokens"], spec["strategy"]["name"]) == (123, "weighted_vote")
        await stream.close()


async def test_penalties_of_a_chat_are_those_of_its_job(ai: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    for given, stored in (({"frequency_penalty": 0.5, "presence_penalty": -2}, (0.5, -2.0)), ({}, (0.0, 0.0))):
        stream = await ai.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, extra_body=given)
        first = await anext(aiter(stream))
        sampling = (await http.get(f"/v1/jobs/{job_of(first.id)}")).json()["spec"]["sampling"]
        assert (sampling["frequency_penalty"], sampling["presence_penalty"]) == stored
        await stream.close()


async def test_without_a_bound_the_default_budget_applies(client: httpx.AsyncClient, settings: Settings) -> None:
    budget = (await spec_of(client))["budget"]
    assert (budget["tokens"], budget["seconds"]) == (settings.budget_tokens, settings.budget_seconds)


async def test_an_effort_chooses_the_strategy_unless_the_client_does(client: httpx.AsyncClient) -> None:
    effort = {"reasoning": {"effort": "low"}}
    assert (await spec_of(client, **effort))["strategy"]["n"] == 4
    bounded = await spec_of(client, **effort, max_output_tokens=100)
    assert (bounded["strategy"]["name"], bounded["strategy"]["n"]) == ("weighted_vote", 4)
    assert (await spec_of(client, **effort, strategy={"name": "beam"}))["strategy"]["name"] == "beam"


async def test_request_fields_are_copied_to_the_job(client: httpx.AsyncClient) -> None:
    spec = await spec_of(
        client,
        temperature=0.3,
        top_p=0.7,
        seed=11,
        user="u-1",
        safety_identifier="s-1",
        metadata={"a": "b"},
        verifier={"kind": "numeric", "expected": 2},
        answer="text",
        deterministic=True,
        priority="batch",
        strategy={"name": "auto", "n": 4},
        confidence=0.9,
    )
    assert (spec["sampling"]["temperature"], spec["sampling"]["top_p"], spec["seed"]) == (0.3, 0.7, 11)
    assert spec["metadata"] == {"a": "b", "user": "u-1", "safety_identifier": "s-1"}
    assert (spec["verifier"]["kind"], spec["answer"]["compare"]) == ("numeric", "text")
    assert (spec["deterministic"], spec["priority"], spec["confidence"]) == (True, "batch", 0.9)
    assert (spec["strategy"]["name"], spec["strategy"]["n"]) == ("auto", 4)


@pytest.mark.parametrize(("stop", "stored"), [("\n\n\n", ["\n\n\n"]), (["a", "b"], ["a", "b"]), ("", []), ([], [])])
async def test_stop_is_one_text_or_several_of_the_job(client: httpx.AsyncClient, stop: Any, stored: list[str]) -> None:
    assert (await spec_of(client, stop=stop))["stop"] == stored


async def test_a_response_echoes_its_request(client: httpx.AsyncClient) -> None:
    body = RESPONSE_BODY | {"reasoning": {"effort": "low", "summary": "concise"}, "user": "u", "max_output_tokens": 9}
    response = (await client.post("/v1/responses", json=body)).json()
    assert response["reasoning"] == {"effort": "low", "summary": "concise"}
    assert (response["user"], response["max_output_tokens"]) == ("u", 9)
    assert response["reasoner"]["budget"]["tokens"] == 9


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error, after checking that it has OpenAI's format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "unsupported"),
    [("/v1/chat/completions", CHAT_BODY, CHAT), ("/v1/responses", RESPONSE_BODY, RESPONSES)],
)
async def test_unsupported_fields_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], unsupported: dict[str, Unsupported]
) -> None:
    for name, what in unsupported.items():
        error = refused(await client.post(path, json=body | {name: "something"}), 400)
        assert (error["param"], error["type"]) == (name, "invalid_request_error")
        assert what.instead in error["message"]


async def test_neutral_values_of_unsupported_fields_pass(client: httpx.AsyncClient) -> None:
    fields = {name: what.neutral[-1] if what.neutral else None for name, what in RESPONSES.items()}
    await spec_of(client, **fields)
    assert not set(CHAT) & set(
        (await client.get("/openapi.json")).json()["components"]["schemas"]["ChatBody"]["properties"]
    )


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"top_k": 5}, "top_k", "known fields: model"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "'developer'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "of role 'tool' has one"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content", "at least 1"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "it is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "images are not supported; parts are 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content.0.type",
            "sounds are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "x", "tone": "y"}]}, "messages.1.tone", "known"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "minimal, low, medium, high"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "minimal, low, medium, high"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort", "give one"),
        ({"reasoning": {"tokens": 5}}, "reasoning.tokens", "known fields: effort, max_tokens"),
        ({"thinking": {"type": "disabled"}}, "thinking.type", "'enabled'"),
        ({"budget": {"effort": "low", "tokens": 7}, "max_tokens": 5}, "budget.tokens", "leave out tokens"),
        ({"budget": {"effort": "low", "tokens": 7}}, "budget.tokens", "leave out tokens"),
        ({"strategy": {"name": "magic"}}, "strategy", "best_of_n"),
        ({"strategy": {"name": "beam", "n": 0}}, "strategy", "n: Input should be greater than or equal to"),
        ({"strategy": {"name": "beam"}, "verifier": {"kind": "exact", "expected": "4"}}, "body", "single steps"),
        ({"metadata": {"user": "a"}, "user": "b"}, "body", "either the field 'user'"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
        ({"model": None}, "model", "string"),
    ],
)
async def test_an_invalid_field_is_named_with_valid_values(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, hint: str
) -> None:
    error = refused(await client.post("/v1/chat/completions", json=CHAT_BODY | fields), 400)
    assert error["param"] == param, error
    assert hint in error["message"], error


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "file_search_call"}]}, "input.0", "function_call and function_call_output"),
        ({"input": [{"type": "reasoning", "summary": [], "id": "rs_1"}]}, "input", "at least 1"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "images are not supported; parts are 'text', 'input_text'",
        ),
        ({"input": ""}, "input", "is empty"),
        ({"max_output_tokens": 10**9}, "max_output_tokens", "10000000"),
    ],
)
async def test_an_invalid_field_of_a_response_is_named(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, hint: str
) -> None:
    error = refused(await client.post("/v1/responses", json=RESPONSE_BODY | fields), 400)
    assert error["param"] == param, error
    assert hint in error["message"], error


async def test_models_are_listed_in_openais_format(ai: AsyncOpenAI) -> None:
    models = (await ai.models.list()).data
    named = ("policy", "prm", "policy:low", "policy:medium", "policy:high")
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        (name, "model", "reasoner") for name in named
    ]
    assert await ai.models.retrieve("prm") == models[1]
    with pytest.raises(openai.NotFoundError, match="policy, prm") as found:
        await ai.models.retrieve("gpt-9")
    assert found.value.code == "model_not_found"


async def test_an_unknown_model_is_not_found(ai: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        await ai.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert (found.value.code, found.value.param) == ("model_not_found", "model")
    assert "policy" in found.value.message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_every_other_error_has_openais_format(settings: Settings, tmp_path: Path, path: str) -> None:
    body = CHAT_BODY if "chat" in path else RESPONSE_BODY
    full = settings.model_copy(update={"queue_cap": 1})
    async with serving(full, ScriptedEngine()) as client:
        json = {"headers": {"Content-Type": "application/json"}}
        assert refused(await client.post(path, content=b"{", **json), 400)["code"] == "malformed_json"
        refused(await client.post(path, content=b"x" * (settings.body_cap + 1), **json), 413)
        refused(await client.put(path), 405)
        refused(await client.get(f"{path}/x"), 404)
        assert (await client.post("/v1/jobs", json={"problem": "?"})).status_code == 202
        response = await client.post(path, json=body)
        assert refused(response, 503)["type"] == "server_error"
        assert int(response.headers["retry-after"]) > 0
    busy = settings.model_copy(update={"limits": LimitsTable(jobs=1)})
    async with serving(busy, ScriptedEngine()) as client:
        response = await client.post(path, json=body)
        error = refused(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "insufficient_quota")
        assert int(response.headers["retry-after"]) > 0
    locked = load_settings(redis_url=settings.redis_url, api_keys="a-key-of-many-characters")
    async with serving(locked, ScriptedEngine()) as client:
        error = refused(await client.post(path, json=body), 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    async with serving(load_settings(data_dir=tmp_path / "nothing"), ScriptedEngine()) as client:
        assert refused(await client.post(path, json=body), 503)["code"] == "broker_unavailable"

    class Broken(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            raise ZeroDivisionError("secret")

    async with serving(settings, Broken()) as client:
        assert "secret" not in str(refused(await client.post(path, json=body), 500))


async def failing(*_: Any, **__: Any) -> Any:
    raise InvalidRequest("the problem has 999 tokens", "problem")


async def test_a_failed_search_reports_its_error_on_each_route(ai: AsyncOpenAI, url: str, store: JobStore) -> None:
    async with working(url, store, failing):
        with pytest.raises(openai.BadRequestError, match="999 tokens") as refusal:
            await ai.chat.completions.create(model=MODEL, messages=QUESTION)
        assert refusal.value.response.headers["x-should-retry"] == "false"  # its tokens were billed
        stream = await ai.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="999 tokens"):
            async for _ in stream:
                pass
        response = await ai.responses.create(model=MODEL, input="?")
        assert response.status == "failed"
        assert response.error is not None
        assert (response.error.code, "999 tokens" in response.error.message) == ("invalid_prompt", True)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/embeddings", "/v1/completions", "/v1/models", "/v1/models/x", "/v1/images/generations"),
        *("/v1/chat/nothing", "/v1/responses/", "/chat/completions", "/responses", "/embeddings"),
    ],
)
async def test_every_path_of_openais_clients_has_errors_in_their_format(client: httpx.AsyncClient, path: str) -> None:
    for method in ("POST", "PATCH"):
        error = refused(await client.request(method, path, json={}), 405 if path.startswith("/v1/models") else 404)
        assert error["type"] == "invalid_request_error"
    for own in ("/v1/jobs/x", "/v1/strategies/x"):
        assert "error" not in (await client.get(own)).json()


async def test_a_path_without_its_version_is_corrected(client: httpx.AsyncClient) -> None:
    assert "/v1/chat/completions" in refused(await client.post("/chat/completions", json={}), 404)["message"]


async def test_a_list_of_models_without_a_key_is_refused_in_openais_format(settings: Settings) -> None:
    locked = load_settings(redis_url=settings.redis_url, api_keys="a-key-of-many-characters")
    async with serving(locked, ScriptedEngine()) as client:
        for path in ("/v1/models", "/v1/embeddings", "/v1/completions"):
            assert refused(await client.get(path), 401)["code"] == "invalid_api_key"


async def test_a_question_that_is_too_long_is_told_as_clients_expect_it(
    ai: AsyncOpenAI, url: str, store: JobStore
) -> None:
    question: Any = [{"role": "user", "content": "word " * 100}]  # of 256 tokens
    async with working(url, store):
        with pytest.raises(openai.BadRequestError, match="prompt is too long") as refusal:
            await ai.chat.completions.create(model=MODEL, messages=question)
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")
