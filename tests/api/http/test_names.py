"""A name is taken by every door as a model, is listed, and may be all that a key is good for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine.protocol.types import ModelInfo
from tests.api.conftest import serving, submitted
from tests.api.keyed import header
from tests.api.openai_client import QUESTION, job_of, listening, working
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings, load_settings
from workers.store.jobs import JobStore

NAMES: dict[str, dict[str, Any]] = {
    "heavy": {
        "model": "policy",
        "description": "Four samples and a vote.",
        "strategy": {"name": "self_consistency", "n": 4},
        "budget": {"tokens": 900},
        "fixed": ["strategy"],
    },
    "gpt-4o": {"model": "policy"},
    "gone": {"model": "nowhere"},
}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return load_settings(**(settings.given | {"names": NAMES}))


async def spec_of(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    spec: dict[str, Any] = (await client.get(f"/v1/jobs/{job_id}")).json()["spec"]
    return spec


async def test_names_are_listed_behind_the_models_with_what_they_stand_for(client: httpx.AsyncClient) -> None:
    listed = {entry["id"]: entry for entry in (await client.get("/v1/models")).json()["data"]}
    assert list(listed) == ["policy", "prm", "heavy", "gpt-4o", "policy:low", "policy:medium", "policy:high"]
    heavy = listed["heavy"]
    assert heavy["description"] == "Four samples and a vote."
    assert heavy["stands_for"] == {"models": ["policy"], "fixed": ["strategy"]}
    assert (heavy["defaults"]["strategy"]["n"], heavy["defaults"]["budget"]) == (4, {"tokens": 900})
    assert heavy["object"] == "model"
    assert "stands_for" not in listed["policy"]
    assert (await client.get("/v1/models/policy:max")).json()["defaults"]["budget"] == {"tokens": 1_280_000}
    missing = await client.get("/v1/models/gone")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_job_and_a_batch_by_name_echo_the_name_and_what_it_stands_for(client: httpx.AsyncClient) -> None:
    spec = await spec_of(client, await submitted(client, model="heavy"))
    assert (spec["name"], spec["model"], spec["strategy"]["n"], spec["budget"]["tokens"]) == ("heavy", "policy", 4, 900)
    jobs = [{"problem": "1 + 1?", "model": "heavy"}, {"problem": "1 + 2?", "model": "gpt-4o"}]
    batch = await client.post("/v1/batches", json={"jobs": jobs, "budget": {"tokens": 1000}})
    specs = [await spec_of(client, job["id"]) for job in batch.json()["jobs"]]
    assert [(spec["name"], spec["model"]) for spec in specs] == [("heavy", "policy"), ("gpt-4o", "policy")]


class Ollama(ScriptedEngine):
    """Serves a model whose name ends as an effort, and that plain name too."""

    async def models(self) -> list[ModelInfo]:
        policy, *others = await super().models()
        return [policy, replace(policy, id="phi3"), replace(policy, id="phi3:medium"), *others]


BOUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("max_completion_tokens", {"messages": QUESTION}),
    "/v1/responses": ("max_output_tokens", {"input": "1 + 1?"}),
    "/v1/messages": ("max_tokens", {"messages": QUESTION}),
}


@pytest.mark.parametrize("door", BOUNDED)
async def test_a_served_model_that_ends_as_an_effort_is_that_model_at_every_door(
    settings: Settings, url: str, store: JobStore, door: str
) -> None:
    """Nothing but the list of the server names it: the settings do not."""
    bound, body = BOUNDED[door]
    async with (
        listening(settings, Ollama()) as address,
        working(url, store, engine=Ollama()),
        httpx.AsyncClient(base_url=address) as client,
    ):
        for model, expected in (
            ("phi3:medium", (None, "phi3:medium", 80_000)),
            ("phi3:low", ("phi3:low", "phi3", 5000)),
        ):
            answer = await client.post(door, json={"model": model, bound: 80_000} | body, timeout=30)
            assert answer.status_code == 200, answer.text
            [newest] = (await store.list_jobs(owner=None, after=None, limit=1)).jobs
            spec = newest["spec"]
            assert (spec.get("name"), spec["model"], spec["budget"]["tokens"]) == expected


async def test_faults_of_a_name_are_refused_in_the_shape_of_each_door(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/jobs", json={"problem": "?", "model": "heavy", "strategy": {"name": "greedy"}})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "strategy")
    gone = await client.post("/v1/jobs", json={"problem": "?", "model": "gone"})
    assert gone.json()["detail"].startswith("model: the name 'gone' stands for nowhere: model 'nowhere' is not served")
    chat = await client.post("/v1/chat/completions", json={"model": "gone", "messages": QUESTION})
    assert (chat.status_code, chat.json()["error"]["code"], chat.json()["error"]["param"]) == (
        *(404, "model_not_found", "model"),
    )
    fixed = {"model": "heavy", "messages": QUESTION, "strategy": {"name": "greedy"}}
    chat = await client.post("/v1/chat/completions", json=fixed)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "strategy")


@pytest.fixture
async def ai(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncOpenAI]:
    async with (
        listening(settings) as address,
        working(url, store),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_openais_client_chats_and_responds_by_name(ai: AsyncOpenAI, store: JobStore) -> None:
    """Whole, as a stream, and in a second turn; the answer has the model that was asked for."""
    chat = await ai.chat.completions.create(model="heavy", messages=QUESTION)  # type: ignore[arg-type]
    assert chat.model == "heavy"
    assert (await store.get(job_of(chat.id)))["spec"]["strategy"]["n"] == 4
    turns = [*QUESTION, {"role": "assistant", "content": chat.choices[0].message.content}, *QUESTION]
    stream = await ai.chat.completions.create(model="policy:low", messages=turns, stream=True)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    assert {chunk.model for chunk in chunks} == {"policy:low"}
    spec = (await store.get(job_of(chunks[0].id)))["spec"]
    assert (spec["strategy"]["name"], spec["budget"]["tokens"]) == ("weighted_vote", 5_000)
    response = await ai.responses.create(model="heavy", input="1 + 1?")
    assert response.model == "heavy"
    assert (await store.get(job_of(response.id)))["spec"]["name"] == "heavy"


@pytest.mark.parametrize(("bound", "tokens"), [(100, 100), (100_000, 900)])
async def test_a_bound_of_the_client_and_the_names_budget_hold_both(
    client: httpx.AsyncClient, store: JobStore, bound: int, tokens: int
) -> None:
    body = {"model": "heavy", "input": "1 + 1?", "max_output_tokens": bound, "background": True}
    response = (await client.post("/v1/responses", json=body)).json()
    assert (await store.get(job_of(response["id"])))["spec"]["budget"]["tokens"] == tokens


async def test_a_key_limited_to_names_reaches_nothing_else(
    settings: Settings, store: JobStore, work: Callable[[str], Awaitable[None]]
) -> None:
    async with serving(settings, ScriptedEngine()) as client:
        client.headers = httpx.Headers(await header(store, "mine", models=["heavy", "policy:low"]))
        listed = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["heavy", "policy:low"]
        assert (await client.get("/v1/models/policy")).status_code == 404
        job_id = await submitted(client, model="heavy")
        await work(job_id)
        for word, count in {"heavy": 1, "policy": 1, "gpt-4o": 0}.items():
            exported = (await client.get("/v1/jobs/export", params={"model": word})).text.splitlines()
            assert len(exported) == count
        for fields in (
            {},
            {"model": "policy"},
            {"model": "gpt-4o"},
            {"model": "heavy", "verifier": {"kind": "judge", "model": "policy"}},
            {"models": [{"model": "heavy"}, {"model": "policy"}]},
        ):
            refused = await client.post("/v1/jobs", json={"problem": "?"} | fields)
            assert (refused.status_code, refused.json()["type"]) == (403, "urn:reasoner:problem:model-not-allowed")
            assert "a key limited to heavy, policy:low" in refused.json()["detail"]
        batch = {"jobs": [{"problem": "?", "model": "policy"}], "budget": {"tokens": 10}}
        assert (await client.post("/v1/batches", json=batch)).status_code == 403
        chat = await client.post("/v1/chat/completions", json={"model": "policy", "messages": QUESTION})
        assert (chat.status_code, chat.json()["error"]["param"]) == (403, "model")
