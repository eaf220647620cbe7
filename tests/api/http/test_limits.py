"""Limits of owners, and refusals that name the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from api.http.limits import RateLimitMiddleware
from api.http.principal import Principal
from engine.protocol.types import EngineUnavailable, TokenizeRequest
from tests.api.conftest import serving, submitted
from tests.api.http.test_bad_input import check_problem
from tests.api.keyed import header
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.config.rate_limits import LimitsTable
from workers.config.settings import Settings
from workers.store.jobs import JobStore
from workers.store.keys import SCOPES


def limited(settings: Settings, **table: Any) -> Settings:
    return settings.model_copy(update={"limits": LimitsTable.model_validate(table), "queue_cap": 1000})


async def test_a_key_over_its_rate_gets_a_429_with_retry_after(settings: Settings, store: JobStore) -> None:
    ann, bob = await header(store, "ann"), await header(store, "bob")
    rare = limited(settings, ann={"requests_per_second": 0.001, "burst": 3})
    async with serving(rare, ScriptedEngine()) as client:
        for left in (2, 1, 0):
            response = await client.get("/v1/jobs", headers=ann)
            assert response.status_code == 200
            assert response.headers["ratelimit-policy"] == '"requests";q=3;w=3000'
            assert response.headers["ratelimit"].startswith(f'"requests";r={left};t=')
        refused = await client.get("/v1/jobs", headers=ann)
        assert check_problem(refused, 429)["type"].endswith(":rate-limited")
        assert 900 < int(refused.headers["retry-after"]) <= 1000
        assert refused.headers["ratelimit"].startswith('"requests";r=0;t=')
        assert (await client.get("/healthz", headers=ann)).status_code == 200
        free = await client.get("/v1/jobs", headers=bob)
        assert free.status_code == 200
        assert "ratelimit" not in free.headers
        assert (await client.get("/v1/jobs", headers=await header(store, "ann"))).status_code == 200  # another bucket


async def test_openais_clients_get_a_rate_limit_error(settings: Settings, store: JobStore) -> None:
    ann = await header(store, "ann")
    async with serving(limited(settings, requests_per_second=0.001), ScriptedEngine()) as client:
        await client.get("/v1/jobs", headers=ann)
        response = await client.post("/v1/chat/completions", json={}, headers=ann)
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) > 0


async def test_open_requests_of_a_key_are_counted_and_released(settings: Settings) -> None:
    opened, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        opened.release()
        await go_on.wait()
        if scope["path"] == "/breaks":
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    service = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(settings=limited(settings, streams=2))))
    limit = RateLimitMiddleware(slow)

    async def call(key: str, path: str = "/") -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            state = {"principal": Principal(key, "ann", SCOPES), "request_id": "r"}
            await limit({**scope, "app": service, "state": state}, receive, send)

        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    open_ = [asyncio.create_task(call("a", path)) for path in ("/", "/breaks")]
    for _ in open_:
        await opened.acquire()
    refused = await call("a")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "2 requests of this key are open" in refused.json()["detail"]
    other = asyncio.create_task(call("b"))
    await opened.acquire()
    go_on.set()
    assert [(await each).status_code for each in (*open_, other)] == [200, 500, 200]
    assert (await call("a")).status_code == 200


@pytest.mark.parametrize(
    ("limits", "body", "field", "hint"),
    [
        ({"tokens": 100}, {"budget": {"tokens": 101}}, "budget.tokens", "101 is more than your limit of 100"),
        ({"tokens": 100}, {"budget": {"effort": "low"}}, "budget.tokens", "5000 is more"),
        ({"seconds": 1.5}, {"budget": {"seconds": 2}}, "budget.seconds", "more than your limit of 1.5"),
        ({"n": 8}, {"strategy": {"name": "best_of_n", "n": 9}}, "strategy.n", "9 is more than your limit of 8"),
        ({"n": 8}, {}, "strategy.n", "16 is more than your limit of 8"),
        ({}, {"strategy": {"name": "best_of_n", "n": 1025}}, "strategy.n", "1025 is more than your limit of 1024"),
        (
            {"tokens": 1_234_567},
            {"budget": {"tokens": 1_234_568}},
            "budget.tokens",
            "1234568 is more than your limit of 1234567",
        ),
        ({"n": 2}, {"candidates": ["1", "2", "3"]}, "candidates", "3 is more than your limit of 2"),
        ({"depth": 5}, {"strategy": {"name": "beam", "max_steps": 6}}, "strategy.max_steps", "6 is more"),
    ],
)
async def test_a_job_over_a_limit_is_refused_rather_than_cut(
    settings: Settings, limits: dict[str, Any], body: dict[str, Any], field: str, hint: str
) -> None:
    async with serving(limited(settings, **limits), ScriptedEngine()) as client:
        response = await client.post("/v1/jobs", json={"problem": "?"} | body)
        problem = check_problem(response, 422)
        assert hint in {error["field"]: error["message"] for error in problem["errors"]}[field]
        jobs = [{"problem": "?"}, {"problem": "?"} | body]
        response = await client.post("/v1/batches", json={"jobs": jobs, "budget": {"tokens": 90}})
        assert response.status_code == 400
        assert f"jobs.1.{field}" in response.json()["error"]["message"] or field == "strategy.n"
        assert (await client.get("/v1/jobs")).json()["data"] == []


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "' + "x" * 40 + '"}'}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"problem": "x" * 41}, "problem"),
        ({"problem": "?", "system": "x" * 41}, "system"),
        ({"problem": "?", "prompt": "{problem}" + "x" * 32}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 41}]}, "messages.0.content"),
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c", "content": "1"},
                ]
            },
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"problem": "?", "candidates": ["1", "x" * 41]}, "candidates.1"),
        ({"problem": "?", "candidates": [[{"role": "assistant", "content": "x" * 41}]]}, "candidates.0.0.content"),
        ({"problem": "?", "verifier": {"kind": "exact", "expected": "x" * 41}}, "verifier.expected"),
    ],
)
async def test_a_text_longer_than_the_limit_is_refused_with_its_place_and_length(
    settings: Settings, body: dict[str, Any], field: str
) -> None:
    async with serving(limited(settings, message_chars=40), ScriptedEngine()) as client:
        problem = check_problem(await client.post("/v1/jobs", json={"prompt": None} | body), 422)
        errors = {error["field"]: error["message"] for error in problem["errors"]}
        assert "characters, which is more than your limit of 40 (limits.message_chars)" in errors[field]
        assert problem["type"].endswith(":over-limit")


async def test_long_texts_and_many_solutions_are_accepted_by_default(settings: Settings) -> None:
    roomy = limited(settings.model_copy(update={"body_cap": Settings.model_fields["body_cap"].default}))
    async with serving(roomy, ScriptedEngine(context=1 << 24)) as client:
        for body in (
            {"problem": "x" * (1 << 20)},
            {"problem": "?", "strategy": {"name": "self_consistency", "n": 1024}},
            {"problem": "?", "candidates": ["1"] * 1024},
            {"problem": "?", "candidates": ["x" * (1 << 20)]},
        ):
            response = await client.post("/v1/jobs", json=body)
            assert response.status_code == 202, response.text[:500]
        problem = check_problem(await client.post("/v1/jobs", json={"problem": "x" * ((1 << 20) + 1)}), 422)
        assert "1048577 characters, which is more than your limit of 1048576" in problem["detail"]


LONG = " ".join(["word"] * 300)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"problem": LONG}, "problem"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ({"problem": "?", "system": LONG}, "problem"),
        ({"problem": "?", "prompt": LONG + " {problem}"}, "problem"),
    ],
)
async def test_a_question_beyond_the_context_is_refused_with_its_length_in_tokens(
    settings: Settings, body: dict[str, Any], field: str
) -> None:
    engine = ScriptedEngine()
    async with serving(limited(settings), engine) as client:
        asked = build_spec(body)
        length = len(await engine.tokenize(TokenizeRequest("policy", asked.to_messages())))
        problem = check_problem(await client.post("/v1/jobs", json={"prompt": None} | body), 422)
        assert problem["type"].endswith(":context-length-exceeded")
        message = {error["field"]: error["message"] for error in problem["errors"]}[field]
        assert f"the problem has {length} tokens, and the context of model 'policy' holds 256" in message
        batch = {"jobs": [{"problem": "?"}, {"prompt": None} | body], "budget": {"tokens": 90}}
        error = (await client.post("/v1/batches", json=batch)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", f"jobs.1.{field}")
        assert (await client.get("/v1/jobs")).json()["data"] == []


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}, "input"),
        ("/v1/responses", {"input": "?", "instructions": LONG}, "input"),
        ("/v1/responses", {"input": LONG, "stream": True}, "input"),
    ],
)
async def test_openais_clients_read_a_question_beyond_the_context_by_its_code_and_field(
    settings: Settings, path: str, sent: dict[str, Any], param: str
) -> None:
    async with serving(limited(settings), ScriptedEngine()) as client:
        response = await client.post(path, json={"model": "policy"} | sent)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["param"] == param
        assert "the prompt is too long" in error["message"]


async def test_a_long_question_waits_for_an_engine_that_cannot_tokenize_now(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> tuple[int, ...]:
        raise EngineUnavailable("away")

    monkeypatch.setattr(ScriptedEngine, "tokenize", fail)
    async with serving(limited(settings), ScriptedEngine()) as client:
        assert (await client.post("/v1/jobs", json={"problem": LONG})).status_code == 202


async def test_candidates_of_a_long_question_are_ranked(settings: Settings) -> None:
    async with serving(limited(settings), ScriptedEngine()) as client:
        assert (await client.post("/v1/jobs", json={"problem": LONG, "candidates": ["1", "2"]})).status_code == 202


async def test_missing_budgets_are_set_to_the_limits_and_echoed(settings: Settings) -> None:
    async with serving(limited(settings, tokens=100, seconds=9.0), ScriptedEngine()) as client:
        for asked, expected in (
            ({}, (100, 9.0)),
            ({"budget": {"tokens": 7}}, (7, 9.0)),
            ({"budget": {"seconds": 2}}, (100, 2.0)),
        ):
            spec = (await client.post("/v1/jobs", json={"problem": "?"} | asked)).json()["spec"]
            assert (spec["budget"]["tokens"], spec["budget"]["seconds"]) == expected


async def test_a_batch_may_have_the_sum_of_its_jobs_budgets(settings: Settings) -> None:
    jobs = [{"problem": "?"}] * 2
    async with serving(limited(settings, tokens=100), ScriptedEngine()) as client:
        response = await client.post("/v1/batches", json={"jobs": jobs, "budget": {"tokens": 201}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "budget.tokens")
        batch = (await client.post("/v1/batches", json={"jobs": jobs, "budget": {"tokens": 200}})).json()
        job = (await client.get(f"/v1/jobs/{batch['jobs'][0]['id']}")).json()
        assert job["spec"]["budget"]["tokens"] == 100


async def test_an_owner_over_its_number_of_jobs_is_refused_until_one_ends(settings: Settings, store: JobStore) -> None:
    ann, also_ann, bob = [await header(store, owner) for owner in ("ann", "ann", "bob")]
    async with serving(limited(settings, jobs=2), ScriptedEngine()) as client:
        for headers in (ann, also_ann):
            response = await client.post("/v1/jobs", json={"problem": "?"}, headers=headers)
            assert response.status_code == 202
        refused = await client.post("/v1/jobs", json={"problem": "?"}, headers=ann)
        assert "2 jobs are unfinished, and the limit is 2" in check_problem(refused, 429)["detail"]
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.post("/v1/jobs", json={"problem": "?"}, headers=bob)).status_code == 202
        await client.post(f"{response.headers['location']}/cancel", headers=ann)
        assert (await client.post("/v1/jobs", json={"problem": "?"}, headers=ann)).status_code == 202


async def test_daily_tokens_are_reserved_and_released(
    settings: Settings, work: Callable[[str], Awaitable[None]]
) -> None:
    async with serving(limited(settings, tokens_a_day=1000), ScriptedEngine()) as client:
        first = await submitted(client, budget={"tokens": 900}, strategy={"name": "greedy"}, seed=1)

        async def status(tokens: int) -> httpx.Response:
            return await client.post("/v1/jobs", json={"problem": "?", "budget": {"tokens": tokens}})

        refused = await status(101)
        assert "900 of 1000 tokens" in check_problem(refused, 429)["detail"]
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        await work(first)
        spent = (await client.get(f"/v1/jobs/{first}")).json()["usage"]
        left = 1000 - spent["generated"] - spent["verifier_computed"]
        assert left > 101
        assert (await status(left + 1)).status_code == 429
        assert (await status(left)).status_code == 202


async def test_a_job_without_a_token_budget_gets_one_under_a_token_quota(settings: Settings) -> None:
    async with serving(limited(settings, tokens_a_day=1000), ScriptedEngine()) as client:
        response = await client.post("/v1/jobs", json={"problem": "?", "budget": {"seconds": 5}})
        assert response.json()["spec"]["budget"]["tokens"] == 1000
        check_problem(await client.post("/v1/jobs", json={"problem": "?", "budget": {"seconds": 5}}), 429)
