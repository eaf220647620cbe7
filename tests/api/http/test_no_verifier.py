"""A service without a process reward model: jobs vote, and strategies that need a verifier are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from engine.protocol.types import ModelInfo
from reasoner.jobs.verifier_specs import PairwiseVerifier
from reasoner.strategies.base import VerifierUse
from reasoner.strategies.registry import STRATEGIES
from tests.api.conftest import serving, submitted
from tests.scripted import ScriptedEngine
from workers.config.model_profiles import ModelProfile
from workers.config.settings import Settings

NEEDY = [name for name, strategy in STRATEGIES.items() if strategy.needs_verifier]
JUDGE = {"kind": "judge"}
RULE = {"kind": "numeric", "expected": 2}


class PolicyAlone(ScriptedEngine):
    """An engine without a process reward model."""

    async def models(self) -> list[ModelInfo]:
        return (await super().models())[:1]


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings.model_copy(update={"prm": "none"}), PolicyAlone()) as client:
        yield client


async def spec(client: httpx.AsyncClient, **job: Any) -> Any:
    return (await client.get(f"/v1/jobs/{await submitted(client, **job)}")).json()["spec"]


def chosen(spec: dict[str, Any]) -> tuple[str, int | None]:
    return spec["strategy"]["name"], spec["strategy"].get("n")


async def test_without_a_verifier_a_default_job_votes_and_echoes_that(
    client: httpx.AsyncClient, store: Any, work: Callable[[str], Awaitable[None]]
) -> None:
    job = await submitted(client)
    told = (await client.get(f"/v1/jobs/{job}")).json()["spec"]
    assert (told["strategy"]["name"], told["verifier"]) == ("self_consistency", None)
    await work(job)
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "completed"


@pytest.mark.parametrize("name", NEEDY)
async def test_a_strategy_that_needs_a_verifier_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/v1/jobs", json={"problem": "?", "strategy": {"name": name}})
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "strategy"
    for part in (repr(name), "needs a verifier", "REASONER_PRM", "'verifier'", "self_consistency"):
        assert part in error["message"]


@pytest.mark.parametrize("name", NEEDY)
async def test_a_verifier_in_the_job_is_used(client: httpx.AsyncClient, name: str) -> None:
    given = JUDGE if STRATEGIES[name].verifier is VerifierUse.STEP_SCORES else RULE
    assert (await spec(client, strategy={"name": name}, verifier=given))["verifier"]["kind"] == given["kind"]


async def test_a_job_with_a_verifier_and_no_strategy_uses_the_verifier(client: httpx.AsyncClient) -> None:
    assert (await spec(client, verifier=RULE))["strategy"]["name"] == "best_of_n"
    assert chosen(await spec(client, verifier=JUDGE, budget={"effort": "low"})) == ("weighted_vote", 4)


async def test_a_tournament_compares_by_the_jobs_own_model(client: httpx.AsyncClient) -> None:
    told = await spec(client, strategy={"name": "tournament"})
    assert (told["verifier"]["kind"], told["verifier"]["model"]) == ("pairwise", "policy")
    listed = {entry["name"]: entry for entry in (await client.get("/v1/strategies")).json()["data"]}
    assert listed["tournament"]["available"]


@pytest.mark.parametrize("verifier", [JUDGE, RULE, None])
async def test_a_tournament_refuses_a_verifier_that_does_not_compare(
    client: httpx.AsyncClient, verifier: dict[str, Any] | None
) -> None:
    body = {"problem": "?", "strategy": {"name": "tournament"}, "verifier": verifier}
    answer = await client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "use one of pairwise" in answer.json()["errors"][0]["message"]


async def test_a_verifier_that_compares_is_refused_by_strategies_that_score(client: httpx.AsyncClient) -> None:
    body = {"problem": "?", "strategy": {"name": "best_of_n"}, "verifier": {"kind": "pairwise"}}
    answer = await client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "use one of tournament" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize("own", [None, PairwiseVerifier(votes=2)])
async def test_a_default_tournament_takes_the_models_verifier_only_if_the_job_names_none(
    settings: Settings, own: PairwiseVerifier | None
) -> None:
    table = {"strategy": {"name": "tournament"}} | ({} if own is None else {"verifier": own.model_dump()})
    models = {"policy": ModelProfile.model_validate(table)}
    async with serving(settings.model_copy(update={"prm": "none", "models": models}), PolicyAlone()) as client:
        # "prm" takes precedence over the table for the default policy
        told = await spec(client)
        assert (told["strategy"]["name"], told["verifier"]["kind"]) == ("tournament", "pairwise")
        explicit = {"problem": "?", "verifier": {"kind": "judge"}}
        answer = await client.post("/v1/jobs", json=explicit)
        assert answer.status_code == 422


async def test_an_absent_process_reward_model_is_refused(client: httpx.AsyncClient) -> None:
    unnamed = await client.post("/v1/jobs", json={"problem": "?", "verifier": {"aggregation": "min"}})
    assert (unnamed.status_code, unnamed.json()["errors"][0]["field"]) == (422, "verifier")
    named = await client.post("/v1/jobs", json={"problem": "?", "verifier": {"model": "other"}})
    assert (named.status_code, named.json()["errors"][0]["field"]) == (422, "verifier.model")


@pytest.mark.parametrize(("effort", "n"), [("low", 4), ("medium", 16), ("high", 64)])
async def test_an_effort_votes_with_its_number_of_samples(client: httpx.AsyncClient, effort: str, n: int) -> None:
    assert chosen(await spec(client, budget={"effort": effort})) == ("self_consistency", n)


async def test_the_minimal_effort_is_greedy(client: httpx.AsyncClient) -> None:
    assert (await spec(client, budget={"effort": "minimal"}))["strategy"]["name"] == "greedy"


@pytest.mark.parametrize("bound", [{}, {"max_completion_tokens": 900}])
async def test_openais_routes_vote_too(client: httpx.AsyncClient, bound: dict[str, int], store: Any) -> None:
    asked = {"model": "policy", "input": "1 + 1?", "background": True, "reasoning": {"effort": "low"}}
    if bound:
        asked["max_output_tokens"] = 900
    answer = await client.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    [job] = (await client.get("/v1/jobs")).json()["data"]
    assert chosen(job["spec"]) == ("self_consistency", 4)


async def test_openais_routes_refuse_a_strategy_that_needs_a_verifier(client: httpx.AsyncClient) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "strategy": {"name": "beam"}}
    answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "strategy"
    assert "'beam' needs a verifier" in answer.json()["error"]["message"]


async def test_a_batch_votes_and_names_the_jobs_that_need_a_verifier(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"jobs": [{"problem": "1 + 1?"}, {"problem": "1 + 2?"}], "budget": {"tokens": 5000}}
    batch = (await client.post("/v1/batches", json=body)).json()
    job = (await client.get(f"/v1/jobs/{batch['jobs'][0]['id']}")).json()["spec"]
    assert (job["strategy"]["name"], job["verifier"]) == ("self_consistency", None)
    body["jobs"][1]["strategy"] = {"name": "dvts"}
    answer = await client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "jobs.1.strategy")


async def test_auto_votes_even_if_an_engine_serves_a_verifier(
    settings: Settings, work: Callable[[str], Awaitable[None]]
) -> None:
    async with serving(settings.model_copy(update={"prm": "none"}), ScriptedEngine()) as client:
        job = await submitted(client, strategy={"name": "auto", "n": 4})
        await work(job)  # on an engine that serves one
        ended = (await client.get(f"/v1/jobs/{job}")).json()
        assert ended["status"] == "completed"
        assert ended["usage"]["verifier_computed"] == 0
        events = (await client.get(f"/v1/jobs/{job}/events")).text
        assert "weighted_vote" not in events


async def test_strategies_list_which_are_available_without_a_verifier(
    client: httpx.AsyncClient, settings: Settings
) -> None:
    listed = (await client.get("/v1/strategies")).json()
    assert listed["default"] == "self_consistency"
    assert {entry["name"] for entry in listed["data"] if not entry["available"]} == set(NEEDY)
    async with serving(settings, ScriptedEngine()) as other:
        listed = (await other.get("/v1/strategies")).json()
    assert listed["default"] == "best_of_n"
    assert all(entry["available"] for entry in listed["data"])


async def test_a_job_may_disable_verification(settings: Settings) -> None:
    async with serving(settings, ScriptedEngine()) as client:
        assert (await spec(client, verifier=None))["strategy"]["name"] == "self_consistency"
        assert chosen(await spec(client, verifier=None, budget={"effort": "medium"})) == ("self_consistency", 16)
        refused = await client.post("/v1/jobs", json={"problem": "?", "verifier": None, "strategy": {"name": "beam"}})
        assert refused.status_code == 422
        assert "'beam' needs a verifier" in refused.text
