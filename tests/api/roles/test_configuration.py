"""Changes of ``reasoner.toml`` while the API runs apply to new jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import serving, submitted
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings

TABLES = """
[effort.low]
tokens = 77

[models.policy.prices]
generated = 2.0

[models.policy]
strategy = {name = "weighted_vote", n = 3}
budget = {seconds = 12}
sampling = {temperature = 0.6, top_k = 9}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.config.reload.CHECK_INTERVAL_SECONDS", 0.0)
    return tmp_path / "reasoner.toml"


@pytest.fixture
async def client(file: Path, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, ScriptedEngine()) as client:
        yield client


def configure(file: Path, text: str) -> None:
    file.write_text(text)


async def spec(client: httpx.AsyncClient, **job: Any) -> Any:
    return (await client.get(f"/v1/jobs/{await submitted(client, **job)}")).json()["spec"]


async def test_changed_efforts_and_prices_apply_to_new_jobs(client: httpx.AsyncClient, file: Path) -> None:
    before = await spec(client, budget={"effort": "low"})
    assert before["budget"]["tokens"] == 5000
    refused = await client.post("/v1/jobs", json={"problem": "?", "budget": {"cost": 1}})
    assert refused.status_code == 422
    configure(file, TABLES)
    assert (await spec(client, budget={"effort": "low"}))["budget"]["tokens"] == 77
    assert (await spec(client, budget={"cost": 1}))["budget"]["cost"] == 1


async def test_changed_limits_apply_to_jobs_and_to_defaults(client: httpx.AsyncClient, file: Path) -> None:
    assert (await spec(client, strategy={"name": "best_of_n", "n": 64}))["strategy"]["n"] == 64
    configure(file, TABLES + "[limits]\nn = 2\n")
    refused = await client.post("/v1/jobs", json={"problem": "?", "strategy": {"name": "best_of_n", "n": 64}})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "strategy.n")
    refused = await client.post("/v1/jobs", json={"problem": "?"})  # the model's default is three samples
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "strategy.n")


async def test_a_models_defaults_are_echoed_and_the_jobs_own_settings_take_precedence(
    client: httpx.AsyncClient, file: Path
) -> None:
    configure(file, TABLES)
    job = await spec(client)
    assert (job["strategy"]["name"], job["strategy"]["n"]) == ("weighted_vote", 3)
    assert (job["budget"]["seconds"], job["budget"]["tokens"]) == (12, None)
    assert (job["sampling"]["temperature"], job["sampling"]["top_k"], job["sampling"]["top_p"]) == (0.6, 9, 1)
    own = await spec(client, strategy={"name": "greedy"}, sampling={"temperature": 1}, budget={"tokens": 50})
    assert (own["strategy"]["name"], own["budget"]["seconds"]) == ("greedy", None)
    assert (own["sampling"]["temperature"], own["sampling"]["top_k"]) == (1, 9)
    other = await client.post("/v1/jobs", json={"problem": "?", "model": "prm"})
    assert other.status_code == 422  # there is no such model, so there is nothing to compare


async def test_jobs_of_a_batch_get_the_models_defaults_except_the_budget(client: httpx.AsyncClient, file: Path) -> None:
    configure(file, TABLES)
    body = {"jobs": [{"problem": "1 + 1?"}, {"problem": "1 + 2?"}], "budget": {"tokens": 5000}}
    batch = (await client.post("/v1/batches", json=body)).json()
    job = (await client.get(f"/v1/jobs/{batch['jobs'][0]['id']}")).json()["spec"]
    assert (job["strategy"]["name"], job["sampling"]["top_k"], job["budget"]["seconds"]) == ("weighted_vote", 9, None)


async def test_a_default_that_does_not_fit_a_job_is_refused_with_advice(client: httpx.AsyncClient, file: Path) -> None:
    configure(file, "[models.policy]\nstrategy = 'beam'\n")
    job = {"problem": "?", "verifier": {"kind": "exact", "expected": "2"}}
    answer = await client.post("/v1/jobs", json=job)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "strategy"
    assert "needs a verifier of single steps" in error["message"]
    assert "name another one" in error["message"]
    batch = await client.post("/v1/batches", json={"jobs": [job], "budget": {"tokens": 5000}})
    assert batch.json()["error"]["param"] == "jobs.0.strategy"


async def test_an_invalid_file_is_reported_and_the_previous_settings_stay(
    client: httpx.AsyncClient, file: Path
) -> None:
    configure(file, TABLES)
    assert (await client.get("/readyz")).json()["configuration"] == "ok"
    configure(file, TABLES.replace("tokens", "tokenz"))
    ready = await client.get("/readyz")
    assert ready.status_code == 200
    assert "reasoner.toml: effort.low.tokenz: unknown setting 'tokenz'" in ready.json()["configuration"]
    assert (await spec(client, budget={"effort": "low"}))["budget"]["tokens"] == 77
