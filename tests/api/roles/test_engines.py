"""A service with several engines: their reported states, and the engines that run its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from benchmarks.service.null_engine import POLICY, VERIFIER, NullEngine
from engine.remote.failover import choose_by_rendezvous
from engine.remote.health import Health
from reasoner.run import run_job
from tests.api.conftest import serving, submitted
from tests.listening import listening
from workers.config.model_profiles import ModelProfile
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

SPEC = {"strategy": {"name": "beam", "n": 8}, "seed": 3, "deterministic": True}


class Engines:
    """Two engines on sockets, by their addresses; ``stop`` ends one."""

    def __init__(self, folder: Path) -> None:
        self.running = contextlib.ExitStack()
        self.engines: dict[str, NullEngine] = {}
        self.stops: dict[str, contextlib.ExitStack] = {}
        for name in ("a", "b"):
            engine, stop = NullEngine(0.0), contextlib.ExitStack()
            url = stop.enter_context(listening(engine.app, folder / f"{name}.sock"))
            self.engines[url], self.stops[url] = engine, stop
            self.running.enter_context(stop)

    async def stop(self, url: str) -> None:
        await asyncio.to_thread(self.stops[url].close)


@pytest.fixture(autouse=True)
def _asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROBE_INTERVAL_SECONDS", "FIRST_PAUSE_SECONDS", "MAX_PAUSE_SECONDS"):
        monkeypatch.setattr(f"engine.remote.health.{name}", 0.0)
    monkeypatch.setattr("engine.remote.replicas.REPORT_PROBE_INTERVAL_SECONDS", 0.0)


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    await asyncio.to_thread(engines.running.close)


@pytest.fixture
def several(settings: Settings, engines: Engines) -> Settings:
    return settings.model_copy(update={"engine_url": tuple(engines.engines), "model": POLICY, "prm": VERIFIER})


@pytest.fixture
async def client(several: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(several) as client:
        yield client


async def work(job_id: str, store: JobStore, settings: Settings, health: Health) -> None:
    engine = connect(settings, health=health)
    try:
        await execute(
            job_id,
            store=store,
            engine=engine,
            run=run_job,
            shutting_down=asyncio.Event(),
            leases=Leases(store, 30),
            claims=ClaimQueue(store, lease=30, max_attempts=3),
        )
    finally:
        await engine.close()


async def result(client: httpx.AsyncClient, job_id: str) -> Any:
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert job["status"] == "completed", job
    return job["result"]


async def samples(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["engine"]: sample.value for sample in found}


async def test_the_service_is_ready_with_one_engine_and_lists_those_that_are_away(
    client: httpx.AsyncClient, engines: Engines
) -> None:
    gone, left = engines.engines
    ready = (await client.get("/readyz")).json()
    assert ready["engines"] == [{"engine": url, "state": "up"} for url in (gone, left)]
    await engines.stop(gone)
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    away, up = answer.json()["engines"]
    assert (away["engine"], away["state"], up) == (gone, "away", {"engine": left, "state": "up"})
    assert "could not be reached" in away["reason"]
    assert await samples(client, "reasoner_engine_up") == {gone: 0, left: 1}
    listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed if "stands_for" not in model] == [POLICY, VERIFIER]

    await engines.stop(left)
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    (error,) = answer.json()["errors"]
    assert error["field"] == "engine"
    assert gone in error["message"]
    assert left in error["message"]


class Shifted(NullEngine):
    """Serves its models by another name, and may fall silent."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def _models(self, request: Request) -> Response:
        await asyncio.to_thread(self.may_answer.wait)
        answer = await super()._models(request)
        listed = json.loads(bytes(answer.body))
        for model in listed["data"]:
            model["id"] = f"far-{model['id']}"
        return JSONResponse(listed)


async def test_a_service_goes_on_with_the_others_while_one_of_several_servers_is_silent(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready, says who is away, lists the models as they were, and lets their jobs wait."""
    monkeypatch.setattr("api.http.model_catalog.CACHE_SECONDS", 0.0)
    far, near = Shifted(), NullEngine(0.0)
    tables = {f"far-{POLICY}": ModelProfile.model_validate({"url": f"unix://{tmp_path / 'far.sock'}"})}
    own = {"engine_url": (f"unix://{tmp_path / 'near.sock'}",), "model": POLICY, "prm": "none", "models": tables}
    with listening(near.app, tmp_path / "near.sock"), listening(far.app, tmp_path / "far.sock"):
        async with serving(settings.model_copy(update=own)) as client:
            before = (await client.get("/v1/models")).json()["data"]
            assert {model["id"]: model["available"] for model in before}[f"far-{POLICY}"]
            far.may_answer.clear()
            try:
                ready = await client.get("/readyz")
                listed = (await client.get("/v1/models")).json()["data"]
                waiting = await client.post("/v1/jobs", json={"problem": "?", "model": f"far-{POLICY}"})
            finally:
                far.may_answer.set()
            assert ready.status_code == 200, ready.text
            assert "far.sock has not answered" in ready.json()["engine"]
            assert {each["engine"]: each["state"] for each in ready.json()["engines"]} == {
                f"unix://{tmp_path / 'near.sock'}": "up",
                f"unix://{tmp_path / 'far.sock'}": "away",
            }
            assert [model["id"] for model in listed] == [model["id"] for model in before]
            away = {model["id"] for model in listed if not model["available"]}
            assert away == {f"far-{POLICY}", *(f"far-{POLICY}:{effort}" for effort in ("low", "medium", "high"))}
            assert waiting.status_code == 202, waiting.text
            while (await client.get("/readyz")).json()["engine"] != "ok":
                pass
            assert (await client.get("/v1/models")).json()["data"] == before


async def test_a_service_whose_own_engine_still_starts_is_not_ready_and_stays_ready_when_it_goes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.model_catalog.CACHE_SECONDS", 0.0)
    monkeypatch.setattr("engine.remote.health.FIRST_PAUSE_SECONDS", 0.0)
    tables = {f"far-{POLICY}": ModelProfile.model_validate({"url": f"unix://{tmp_path / 'far.sock'}"})}
    own = {"engine_url": (f"unix://{tmp_path / 'near.sock'}",), "model": POLICY, "prm": "none", "models": tables}
    with listening(Shifted().app, tmp_path / "far.sock"):
        async with serving(settings.model_copy(update=own)) as client:
            starting = await client.get("/readyz")
            assert starting.status_code == 503
            assert "near.sock could not be reached" in starting.json()["errors"][0]["message"]
            with listening(NullEngine(0.0).app, tmp_path / "near.sock"):
                async with asyncio.timeout(30):
                    while (await client.get("/readyz")).status_code != 200:
                        pass
            gone = await client.get("/readyz")
            assert gone.status_code == 200, gone.text
            assert "near.sock" in gone.json()["engine"]


async def test_a_service_whose_only_servers_that_answer_cannot_write_is_not_ready(
    settings: Settings, tmp_path: Path
) -> None:
    own = {"engine_url": (f"unix://{tmp_path / 'gone.sock'}",), "model": POLICY, "prm": VERIFIER}
    own |= {"prm_url": (f"unix://{tmp_path / 'prm.sock'}",)}
    with listening(NullEngine(0.0).app, tmp_path / "prm.sock"):
        async with serving(settings.model_copy(update=own)) as client:
            answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "gone.sock could not be reached" in answer.json()["errors"][0]["message"]


async def test_a_job_runs_on_the_engine_of_its_id_and_on_another_one_with_the_same_result(
    client: httpx.AsyncClient, engines: Engines, several: Settings, store: JobStore
) -> None:
    health = Health()
    job_id = await submitted(client, **SPEC)
    home = choose_by_rendezvous(engines.engines, job_id)
    (other,) = set(engines.engines) - {home}
    await work(job_id, store, several, health)
    expected = await result(client, job_id)
    assert engines.engines[home].asked["branches"] > 0
    assert not any(engines.engines[other].asked.values())
    assert set(health.take_counts()) == {(home, "requests")}

    await engines.stop(home)
    while choose_by_rendezvous(engines.engines, job_id := await submitted(client, **SPEC)) != home:
        await client.post(f"/v1/jobs/{job_id}/cancel")
    await work(job_id, store, several, health)
    assert await result(client, job_id) == expected
    assert engines.engines[other].asked["branches"] > 0


async def test_requests_of_all_workers_to_engines_are_counted(
    client: httpx.AsyncClient, engines: Engines, store: JobStore
) -> None:
    await store.increment_counters({"engine:requests:http://a:1": 3, "engine:failures:http://a:1": 1})
    await store.increment_counters({"engine:requests:http://a:1": 2, "engine:requests:unix:///b": 1})
    requests = await samples(client, "reasoner_engine_requests_total")
    failures = await samples(client, "reasoner_engine_failures_total")
    known = dict.fromkeys(engines.engines, 0)  # zeros, from which an increase can be told
    assert requests == known | {"http://a:1": 5, "unix:///b": 1}
    assert failures == known | {"http://a:1": 1}
