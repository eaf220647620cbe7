"""Harnesses, gateways and user interfaces that send our service what they send to OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.roles.supervisor import free_port
from tests.clients.conftest import ENVIRONMENT, EXAMPLES, PROXY, Await, Run, run_program
from tests.clients.test_clients import CONVERSATION
from tests.clients.upstream import ARGUMENTS, CAPITAL, MODEL, PERSON
from tests.vllm.servers import Server, Service, running

_PROXY_CONFIG = """
model_list:
  - {{model_name: {bot}, litellm_params: {{model: openai/{bot}, api_base: {url}/v1, api_key: none}}}}
  - {{model_name: policy, litellm_params: {{model: openai/policy, api_base: {url}/v1, api_key: none}}}}
router_settings: {{num_retries: 0}}
"""
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.client(name="lm-evaluation-harness", package="lm_eval", runs="chat, error")
def test_lm_evaluation_harness(run_harness: Run) -> None:
    assert run_harness("lm_eval_client.py") == {"accuracy": 0.5, "answers": [CAPITAL, CAPITAL], "error": True}


@pytest.mark.client(name="Inspect", package="inspect_ai", runs="chat, second turn, tool, structured output, error")
def test_inspect(run_harness: Run) -> None:
    expected: dict[str, Any] = {
        "plain": [1.0, CAPITAL],
        "second": [1.0, CONVERSATION["second"]],
        "tool": [1.0, CONVERSATION["tool"]],
        "parsed": PERSON,
        "error": True,
    }
    second = expected["second"][1].replace(CAPITAL, f"\n{CAPITAL}")  # it joins a thought, even none, and a text so
    chat = expected | {"second": [1.0, second]}
    assert run_harness("inspect_client.py") == {"chat": chat, "responses": expected}


@pytest.mark.client(name="Inspect, in batches", package="inspect_ai", runs="chat, second turn, error")
def test_the_batch_mode_of_inspect(run_harness: Run) -> None:
    expected = {"chat": 1.0, "responses": 1.0, "messages": 1.0, "errors": [None, True]}
    assert run_harness("inspect_batch_client.py") == expected


@pytest.fixture
def proxy(service: Service, tmp_path: Path) -> Iterator[Server]:
    program = PROXY / "bin" / "litellm"
    if not program.exists() or not (ENVIRONMENT / ".installed-python").exists():
        pytest.skip("LiteLLM's proxy is not installed: run make test-harnesses")
    (tmp_path / "config.yaml").write_text(_PROXY_CONFIG.format(url=service.url, bot=MODEL))
    port = free_port()
    command = [str(program), "--config", str(tmp_path / "config.yaml"), "--telemetry", "False"]
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    settings["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # it serves this test alone
    place = ("--host", "127.0.0.1", "--port", str(port))
    server = Server(tmp_path / "log", [*command, *place], port, settings, "/health/liveliness")
    with running(server):
        yield server


@pytest.mark.client(
    name="LiteLLM's proxy",
    package="litellm",
    runs="chat, stream, second turn, tool, structured output, error, cancel",
)
def test_the_proxy_of_litellm(proxy: Server, await_cancelled: Await) -> None:
    python, example = str(ENVIRONMENT / "bin" / "python"), str(EXAMPLES / "litellm_client.py")
    found = run_program([python, example, f"{proxy.url}/v1", MODEL, "policy"])
    assert {name: found.get(name) for name in CONVERSATION} == CONVERSATION
    assert found["cut"] == "length"
    assert found["too_long"] == "ContextWindowExceededError"
    assert found["error"] == "BadRequestError"  # the proxy knows its models
    await_cancelled(1)


def _read_stream(service: Service, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the text of a stream as Open WebUI reads it, the parts of its calls, and the usages."""
    text, calls, usages = "", [], []
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, headers=_HEADERS, timeout=120) as answer:
        answer.raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            usages += [chunk["usage"]] if chunk.get("usage") else []
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                calls += choice["delta"].get("tool_calls") or []
    return text, calls, usages


_HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "5b1c",
    "X-OpenWebUI-User-Email": "ada@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c0ffee",
}


@pytest.mark.client(
    name="Open WebUI (its requests)",
    package="open-webui",
    version="(requests as in its source)",
    runs="models, chat, stream, second turn, title and tags, tool, error, cancel",
)
def test_the_requests_of_open_webui(service: Service, await_cancelled: Await) -> None:
    url = f"{service.url}/v1/chat/completions"
    models = httpx.get(f"{service.url}/v1/models", headers=_HEADERS, timeout=60).json()["data"]
    assert MODEL in [model["id"] for model in models]
    question = {"role": "user", "content": "What is the capital of France?"}
    common: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    text, _, usages = _read_stream(service, common | {"messages": [question]})
    assert text == CAPITAL
    assert [usage["completion_tokens"] > 0 for usage in usages] == [True]
    history = [
        {"role": "system", "content": "You are helpful."},
        question,
        {"role": "assistant", "content": CAPITAL},
        {"role": "user", "content": [{"type": "text", "text": "And what did I ask?"}]},
    ]
    sampling = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 256, "frequency_penalty": 0, "seed": 4, "stop": ["###"]}
    assert _read_stream(service, common | sampling | {"messages": history})[0] == CONVERSATION["second"]
    for limit in ({"max_completion_tokens": 1000}, {"max_tokens": 1000}, {}):  # a title, tags, follow-up questions
        task = {"role": "user", "content": '### Task:\nAnswer in JSON: { "title": "…" }\n### Chat History:\n…'}
        body = {"model": MODEL, "messages": [task], "stream": False, **limit}
        answer = httpx.post(url, json=body, headers=_HEADERS, timeout=120).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"]
    weather = {"role": "user", "content": "How is the weather in Paris?"}
    _, calls, _ = _read_stream(service, common | {"messages": [weather], "tools": [_TOOL]})
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == ARGUMENTS
    called = {"role": "assistant", "content": "", "tool_calls": [calls[0] | {"type": "function"}]}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}
    text, _, _ = _read_stream(service, common | {"messages": [weather, called, result], "tools": [_TOOL]})
    assert text == CONVERSATION["tool"]
    refused = httpx.post(url, json=common | {"model": "nobody", "messages": [question]}, headers=_HEADERS, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    endless = {"role": "user", "content": "Tell an endless story."}
    with httpx.stream("POST", url, json=common | {"messages": [endless]}, headers=_HEADERS, timeout=60) as answer:
        next(answer.iter_lines())
    await_cancelled(1)
