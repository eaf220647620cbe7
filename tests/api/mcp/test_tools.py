"""The tools over HTTP, called by the protocol's own client, of the newest revision and of older ones."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolResult

from tests.api.mcp.clients import MODES, connect
from tests.api.openai_client import address, http, serving, worker
from workers.config.settings import Settings

__all__ = ["address", "http", "worker"]

QUESTION = {"problem": "1 + 1?", "budget": {"tokens": 2000}, "seed": 1}

both_eras = pytest.mark.parametrize("mode", MODES)


def read_text(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content)


async def wait_for_job(http: httpx.AsyncClient) -> str:
    """Return the id of the only job, once it is submitted."""
    jobs: list[dict[str, Any]] = []
    async with asyncio.timeout(200):
        while not jobs:
            jobs = (await http.get("/v1/jobs")).json()["data"]
    return str(jobs[0]["id"])


@both_eras
async def test_every_tool_describes_itself_by_valid_schemas(address: str, mode: str) -> None:
    async with connect(address, mode=mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == ["solve", "select", "job", "cancel"]
    for tool in tools.values():
        for schema in (tool.input_schema, tool.output_schema):
            jsonschema.Draft202012Validator.check_schema(schema)
            assert "null" not in str(schema)
        assert tool.input_schema["additionalProperties"] is False
    jsonschema.validate(QUESTION, tools["solve"].input_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(QUESTION | {"budget": {"tokens": 0}}, tools["solve"].input_schema)


@both_eras
async def test_a_solved_question_has_the_answer_and_the_bill_of_its_job(
    address: str, http: httpx.AsyncClient, worker: None, mode: str
) -> None:
    async with connect(address, mode=mode) as client:
        result = await client.call_tool("solve", QUESTION)
    assert not result.is_error
    output: Any = result.structured_content
    job = (await http.get(f"/v1/jobs/{output['job_id']}")).json()
    assert job["spec"]["budget"]["tokens"] == 2000
    assert job["spec"]["seed"] == 1
    assert (output["status"], output["answer"]) == ("completed", job["result"]["answer"])
    assert output["confidence"] == job["result"]["confidence"]
    assert output["usage"]["tokens"] == job["usage"]["generated"] + job["usage"]["verifier_computed"]
    assert output["text"] == job["result"]["text"]
    assert output["answer"] in read_text(result)


@both_eras
async def test_progress_is_the_tokens_so_far_of_those_of_the_budget(
    address: str, worker: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("api.mcp.tools.PROGRESS_SECONDS", 0.0)
    reports = list[tuple[float, float | None, str | None]]()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total, message))

    async with connect(address, mode=mode) as client:
        result = await client.call_tool("solve", QUESTION, progress_callback=note)
    counts = [progress for progress, _, _ in reports]
    assert counts == sorted(set(counts))
    output: Any = result.structured_content
    assert 0 < counts[-1] <= output["usage"]["tokens"]
    assert {total for _, total, _ in reports} == {2000}
    assert any(message and message.startswith("Leading:") for _, _, message in reports)


async def test_candidates_are_ranked(address: str, worker: None) -> None:
    candidates = ["\\boxed{1}", "\\boxed{2}", "so \\boxed{2}"]
    async with connect(address) as client:
        result = await client.call_tool("select", {"problem": "how?", "candidates": candidates, "by": "majority"})
    output: Any = result.structured_content
    assert output["answer"] == "2"
    assert [item["index"] for item in output["ranking"]] == [1, 2, 0]
    assert output["usage"]["generated"] == 0


async def test_a_conversation_is_a_question_too(address: str, http: httpx.AsyncClient, worker: None) -> None:
    turns = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2?"},
    ]
    async with connect(address) as client:
        output: Any = (await client.call_tool("solve", {"messages": turns, "system": None})).structured_content
    spec = (await http.get(f"/v1/jobs/{output['job_id']}")).json()["spec"]
    assert [message["content"] for message in spec["messages"]] == ["1?", "1", "2?"]


async def test_a_job_in_the_background_is_waited_for_with_its_id(
    address: str, http: httpx.AsyncClient, worker: None
) -> None:
    async with connect(address) as client:
        begun: Any = (await client.call_tool("solve", QUESTION | {"background": True})).structured_content
        assert begun["job_id"] in begun["next_step"]
        ended: Any = None
        async with asyncio.timeout(200):
            while ended is None or ended["status"] in ("queued", "in_progress"):
                arguments = {"job_id": begun["job_id"], "wait_seconds": 20}
                ended = (await client.call_tool("job", arguments)).structured_content
    tree = (await http.get(f"/v1/jobs/{begun['job_id']}/tree")).json()
    assert ended["status"] == "completed"
    assert ended["search"]["branches"] == len(tree["nodes"])
    assert ended["search"]["live"] == 0
    assert sum(item["count"] for item in ended["search"]["answers"]) == sum(
        node["answer"] is not None for node in tree["nodes"]
    )


async def test_a_job_is_cancelled_by_its_id(address: str) -> None:
    async with connect(address) as client:
        begun: Any = (await client.call_tool("solve", QUESTION | {"background": True})).structured_content
        cancelled: Any = (await client.call_tool("cancel", {"job_id": begun["job_id"]})).structured_content
        assert cancelled["status"] == "cancelled"
        shown: Any = (await client.call_tool("job", {"job_id": begun["job_id"]})).structured_content
    assert shown["status"] == "cancelled"


async def test_a_call_that_its_client_gives_up_cancels_the_job(address: str, http: httpx.AsyncClient) -> None:
    async with connect(address) as client:
        call = asyncio.create_task(client.call_tool("solve", QUESTION))
        job_id = await wait_for_job(http)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        job = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()
    assert job["status"] == "cancelled"


@both_eras
async def test_a_process_that_ends_leaves_the_job_and_says_how_to_get_it(
    settings: Settings, http: httpx.AsyncClient, mode: str
) -> None:
    async with serving(settings) as (other, server), connect(other, mode=mode) as client:
        await client.list_tools()  # whose schema the client checks the result by
        call = asyncio.create_task(client.call_tool("solve", QUESTION))
        await wait_for_job(http)
        server.should_exit = True
        output: Any = (await call).structured_content
    assert output["status"] == "queued"
    assert output["job_id"] in output["next_step"]
    assert (await http.get(f"/v1/jobs/{output['job_id']}")).json()["status"] == "queued"


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("solve", {}, "body: there is no question: give 'problem', a text, or 'messages'"),
    ("solve", {"problem": " "}, "problem: the problem is empty"),
    ("solve", {"problem": "?", "budget": {"tokens": 0}}, "budget.tokens: Input should be greater than or equal"),
    ("solve", {"problem": "?", "tokens": 5}, "'tokens' is a field of 'budget': write {\"budget\""),
    ("solve", {"problem": "?", "n": 4}, "'n' is a parameter of strategies: write {\"strategy\""),
    ("solve", {"problem": "?", "strategy": {"name": "magic"}}, "unknown strategy 'magic'; known are greedy"),
    ("solve", {"problem": "?", "strategy": {"name": "greedy", "n": 4}}, "its parameters: none"),
    ("solve", {"problem": "?", "verifier": {"kind": "magic"}}, "verifier"),
    ("solve", {"problem": "?", "verifier": {"kind": "numeric"}}, "verifier.expected: Field required"),
    ("solve", {"problem": "?", "budget": {"effort": "heroic"}}, "budget.effort"),
    ("solve", {"problem": "?", "model": "gone"}, "model"),
    ("solve", {"problem": "?", "messages": [{"role": "user", "content": "?"}]}, "give either 'problem' or"),
    ("solve", {"problem": "?", "background": "maybe"}, "background: Input should be a valid boolean"),
    ("select", {"problem": "?"}, "candidates: Field required"),
    ("select", {"problem": "?", "candidates": ["x"], "by": "tournament"}, "a tournament needs two"),
    ("job", {}, "job_id: Field required"),
    ("job", {"job_id": "job_1"}, "there is no job 'job_1'"),
    ("job", {"job_id": "../keys"}, "there is no job '../keys'"),
    ("job", {"job_id": "job_1", "wait_seconds": 600}, "wait_seconds: Input should be less than or equal to 50"),
    ("cancel", {"job_id": "job_" + "0" * 32}, "there is no job"),
]
"""A tool, wrong arguments of it, and words of the refusal."""


async def test_wrong_arguments_are_refused_in_words_that_an_agent_can_mend_them_by(address: str) -> None:
    async with connect(address) as client:
        for tool, arguments, expected in MISTAKES:
            result = await client.call_tool(tool, arguments)
            assert result.is_error, (tool, arguments)
            assert expected in read_text(result), (tool, arguments, read_text(result))


@both_eras
async def test_an_unknown_tool_is_a_protocol_error_that_names_the_others(address: str, mode: str) -> None:
    async with connect(address, mode=mode) as client:
        with pytest.raises(MCPError, match="solve, select, job, cancel") as caught:
            await client.call_tool("answer", {})
    assert caught.value.code == INVALID_PARAMS
