"""Errors as Anthropic's client raises them, from routes and from middleware, and its headers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from engine.protocol.types import EngineUnavailable, ModelInfo
from tests.api.anthropic.client import MODEL, QUESTION, client, http, talking
from tests.api.keyed import header
from tests.api.openai_client import listening
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["client", "http"]

ASK: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 100}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1"),
    ({"messages": []}, "messages: .*at least 1"),
    ({"messages": [{"role": "user", "content": ""}]}, r"messages\.0\.content: it is empty"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "2, since"}]}, r"messages\.1: .*end with a message"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\.0\.content\.0: .*images are not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        r"messages\.0\.content\.0: .*documents are not supported: give its content as a text block",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "web_search_tool_result"}]}]},
        r"messages\.0\.content\.0: .*runs at Anthropic",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "no such type of block; known are text, thinking"),
    ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers: not supported: give the functions"),
    ({"container": "c"}, "container: not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: not supported"),
    ({"output_format": {"type": "json_schema"}}, "output_format: not supported: write .*output_config"),
    ({"output_config": {"task_budget": {"total": 9}}}, r"output_config\.task_budget: unknown field; known fields: eff"),
    ({"output_config": {"effort": "huge"}}, r"output_config\.effort: there is no effort 'huge'; known are minimal"),
    ({"output_config": {"effort": "low"}, "budget": {"effort": "high"}}, "contradict each other"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, r"thinking\.budget_tokens: .*leaves nothing of max_tok"),
    ({"thinking": {"type": "between_tools"}}, "thinking: there is no such type of thinking; known are enabled"),
    ({"temperature": 3}, "temperature: "),
    ({"stop_sequences": [""]}, r"stop_sequences\.0: "),
    ({"max_token": 3}, "max_token: unknown field; .*known fields: .*max_tokens"),
    ({"seed": True}, "seed: must be a number"),
    ({"strategy": {"name": "x"}}, "strategy: unknown strategy 'x'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
async def test_what_is_not_supported_is_refused_by_name(
    client: AsyncAnthropic, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as refusal:
        await client.post("/v1/messages", body=ASK | fields, cast_to=object)
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.request_id
    body: Any = refusal.value.body
    assert (body["type"], body["request_id"]) == ("error", refusal.value.request_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "auto", "speed": "fast", "cache_control": {"type": "ephemeral"}, "diagnostics": None},
        {"container": None, "mcp_servers": [], "context_management": {"edits": []}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"metadata": {"user_id": None}, "tools": [], "top_k": 5, "temperature": 0.5},
        {"thinking": {"type": "enabled", "budget_tokens": 20}},  # the model does not think
    ],
)
async def test_what_changes_no_answer_is_accepted(client: AsyncAnthropic, fields: dict[str, Any]) -> None:
    answer: Any = await client.post("/v1/messages", body=ASK | fields, cast_to=object)
    assert answer["content"]


async def test_errors_of_middleware_have_the_same_format(settings: Settings, store: JobStore) -> None:
    async with listening(settings) as address, httpx.AsyncClient(base_url=address, timeout=60) as http:
        ann = await header(store, "ann")
        token = ann["Authorization"].removeprefix("Bearer ")
        unknown = await http.post("/v1/messages", json=ASK, headers={"x-api-key": "wrong"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
        assert "x-api-key" in unknown.json()["error"]["message"]
        readers = await header(store, "bob", "jobs:read")
        cases: list[tuple[str, dict[str, Any], int, str]] = [
            ("/v1/messages", {"json": ASK, "headers": readers}, 403, "permission_error"),
            ("/v1/messages", {"content": b"x" * 30_000}, 413, "request_too_large"),
            ("/v1/messages", {"content": b"{", "headers": {"content-type": "application/json"}}, 400, ""),
            ("/v1/messages", {"content": b"x", "headers": {"content-encoding": "gzip"}}, 415, ""),
            ("/v1/messages", {"json": ASK | {"model": "x"}}, 404, "not_found_error"),
            ("/v1/messages/batches", {"json": {}}, 400, ""),
            ("/v1/messages/tokens", {"json": {}}, 404, "not_found_error"),
            ("/v1/messages/count_tokens", {"json": {}}, 400, ""),
        ]
        for path, sent, status, kind in cases:
            answer = await http.post(path, **sent | {"headers": {"x-api-key": token} | sent.get("headers", {})})
            error = answer.json()
            assert (answer.status_code, error["type"]) == (status, "error"), answer.text
            assert error["error"]["type"] == (kind or "invalid_request_error")
            assert error["request_id"] == answer.headers["request-id"]
        wrong_method = await http.get("/v1/messages", headers=ann)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
        assert wrong_method.json()["error"]["type"] == "invalid_request_error"


async def test_a_key_is_taken_from_either_header(settings: Settings, store: JobStore) -> None:
    async with listening(settings) as address:
        token = (await header(store, "ann"))["Authorization"].removeprefix("Bearer ")
        for given in ({"api_key": token}, {"auth_token": token}):
            async with AsyncAnthropic(base_url=address, max_retries=0, **given) as client:
                assert (await client.messages.count_tokens(model=MODEL, messages=QUESTION)).input_tokens
        async with AsyncAnthropic(base_url=address, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.count_tokens(model=MODEL, messages=QUESTION)


async def test_a_rate_limit_is_told_in_anthropics_headers(settings: Settings, store: JobStore) -> None:
    limited = settings.model_copy(
        update={"limits": settings.limits.model_copy(update={"requests_per_second": 0.01, "burst": 2})}
    )
    async with listening(limited) as address:
        token = (await header(store, "ann"))["Authorization"].removeprefix("Bearer ")
        async with AsyncAnthropic(base_url=address, max_retries=0, api_key=token) as client:
            first = await client.messages.with_raw_response.count_tokens(model=MODEL, messages=QUESTION)
            assert first.headers["anthropic-ratelimit-requests-limit"] == "2"
            assert first.headers["anthropic-ratelimit-requests-remaining"] == "1"
            assert datetime.fromisoformat(first.headers["anthropic-ratelimit-requests-reset"]).tzinfo is not None
            await client.messages.count_tokens(model=MODEL, messages=QUESTION)
            with pytest.raises(anthropic.RateLimitError) as refusal:
                await client.messages.count_tokens(model=MODEL, messages=QUESTION)
            assert refusal.value.type == "rate_limit_error"
            assert int(refusal.value.response.headers["retry-after"]) > 0
            assert refusal.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"


class BusyEngine(ScriptedEngine):
    """An engine that is away for the first questions."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    async def models(self) -> list[ModelInfo]:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise EngineUnavailable("it starts")
        return await super().models()


async def test_a_service_that_cannot_answer_is_overloaded_and_asked_again(
    settings: Settings, url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.model_catalog.CACHE_SECONDS", 0.0)
    async with talking(settings, url, store, BusyEngine(10**6)) as client:
        with pytest.raises(anthropic.OverloadedError) as refusal:
            await client.messages.count_tokens(model=MODEL, messages=QUESTION)
        assert (refusal.value.status_code, refusal.value.type) == (529, "overloaded_error")
        assert refusal.value.response.headers["retry-after"] == "1"
    async with talking(settings, url, store, BusyEngine(2)) as client:
        again = client.with_options(max_retries=2)
        assert (await again.messages.count_tokens(model=MODEL, messages=QUESTION)).input_tokens


async def test_a_failed_job_is_not_asked_again(client: AsyncAnthropic, store: JobStore) -> None:
    long = [{"role": "user", "content": "word " * 100}]  # of 256 tokens
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(model=MODEL, messages=long, max_tokens=100)
