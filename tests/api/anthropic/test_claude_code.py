"""Requests as Claude Code sends them, written by hand after its public documentation of gateways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import ModelInfo as AnthropicModel

from tests.api.anthropic.client import MODEL, client, http, job_of, talking
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["client", "http"]

USER = f"user_{'a' * 64}_account_00000000-0000-0000-0000-000000000000_session_11111111-1111-1111-1111-111111111111"
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "authorization": "Bearer none",
    "x-app": "cli",
    "x-claude-code-session-id": "11111111-1111-1111-1111-111111111111",
    "x-stainless-retry-count": "0",
}


def make_tool(name: str) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string", "description": "The path"}, "limit": {"type": "number"}},
        "required": ["file_path"],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"Runs {name}.", "input_schema": schema, "eager_input_streaming": True}


REQUEST: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
        {"type": "text", "text": "You help with software.", **CACHED},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>No todo list.</system-reminder>"},
                {"type": "text", "text": "Read it.", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should read.", "signature": "EqoBCkgIBxABGAIiQ"},
                {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "toolu_01A", "name": "Read", "input": {"file_path": "/a"}},
                {"type": "tool_use", "id": "toolu_01B", "name": "Bash", "input": {"file_path": "/b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01A", "content": [{"type": "text", "text": "1 line"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01B",
                    "content": "<tool_use_error>no such file</tool_use_error>",
                    "is_error": True,
                    **CACHED,
                },
                {"type": "text", "text": "<system-reminder>The file changed.</system-reminder>"},
            ],
        },
        {"role": "user", "content": "And now?"},
    ],
    "tools": [make_tool(name) for name in ("Read", "Bash", f"mcp__{'server' * 10}__tool")],
    "metadata": {"user_id": USER},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "low"},
}
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{{ call.arguments }}</tool_call>{% endif %}"


class Coder(ScriptedEngine):
    """An engine whose context holds such a request, and whose template shows a format of calls."""

    def __init__(self) -> None:
        super().__init__(context=4096)
        self.rendered: list[Any] = []

    async def models(self) -> list[Any]:
        return [replace(info, chat_template=TEMPLATE, context=4096) for info in await super().models()]

    async def tokenize(self, request: Any) -> tuple[int, ...]:
        if not isinstance(request.text, str):
            self.rendered.append(request.text)
        return await super().tokenize(request)


async def test_a_request_of_claude_code_is_answered(settings: Settings, url: str, store: JobStore) -> None:
    engine = Coder()
    wide = settings.model_copy(update={"body_cap": 1 << 20})
    async with (
        talking(wide, url, store, engine) as client,
        httpx.AsyncClient(base_url=str(client.base_url), timeout=60, headers=HEADERS) as http,
    ):
        probe = await http.head("/")
        assert probe.status_code == 200
        counted = {name: REQUEST[name] for name in ("model", "system", "messages", "tools", "thinking")}
        count = await http.post("/v1/messages/count_tokens?beta=true", json=counted)
        assert count.status_code == 200, count.text
        answer = await http.post("/v1/messages?beta=true", json=REQUEST)
        assert answer.status_code == 200, answer.text
        assert "event: message_stop" in answer.text, answer.text
        job = (await http.get("/v1/jobs")).json()["data"][0]
    system, question, call, first, second, last = engine.rendered[-1]
    assert system["content"].endswith("You help with software.\nBe brief.")
    assert question["content"] == "<system-reminder>No todo list.</system-reminder>\nRead it."
    assert (call["content"], [each["id"] for each in call["tool_calls"]]) == ("I read.", ["toolu_01A", "toolu_01B"])
    assert (first["content"], first["tool_call_id"]) == ("1 line", "toolu_01A")
    assert second["content"] == "Error: <tool_use_error>no such file</tool_use_error>"
    assert last == {"role": "user", "content": "<system-reminder>The file changed.</system-reminder>\nAnd now?"}
    assert job["spec"]["metadata"] == {"user_id": USER}
    assert job["spec"]["budget"]["tokens"] == 5000  # of the effort, which is smaller than max_tokens
    assert job["spec"]["strategy"]["n"] == 4


async def test_the_count_of_tokens_is_that_of_the_prompt(client: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "1 + 1?"}], "system": "Brief."}
    counted = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=100, extra_body={"strategy": {"name": "greedy"}})
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    long = [{"role": "user", "content": "word " * 100}]
    assert (await client.messages.count_tokens(model=MODEL, messages=long)).input_tokens > 256  # of the context
    assert (await http.get(f"/v1/jobs/{job_of(message.id)}")).json()["spec"]["messages"][0]["role"] == "system"


async def test_models_are_listed_for_the_clients_of_both(client: AsyncAnthropic) -> None:
    page = await client.models.list()
    ids = [model.id for model in page.data]
    assert ids[:2] == [MODEL, "prm"]
    assert f"{MODEL}:low" in ids[2:]
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, ids[-1])
    [first] = (await client.models.list(limit=1)).data
    AnthropicModel.model_validate(first.model_dump())
    assert (first.type, first.id, first.display_name, first.lifecycle) == ("model", MODEL, MODEL, "active")
    assert first.created_at.tzinfo is not None
    assert [model.id async for model in client.models.list(limit=2)] == ids
    assert [model.id for model in (await client.models.list(before_id="prm")).data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).max_input_tokens == 256
    with pytest.raises(anthropic.NotFoundError, match="served are policy") as missing:
        await client.models.retrieve("claude-x")
    assert missing.value.type == "not_found_error"
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none") as other:
        listed = await other.models.list()
        assert [model.id for model in listed.data] == ids
        assert {(model.object, model.owned_by) for model in listed.data} == {("model", "reasoner")}
        with pytest.raises(openai.NotFoundError) as unknown:
            await other.models.retrieve("gpt-x")
        assert unknown.value.code == "model_not_found"
