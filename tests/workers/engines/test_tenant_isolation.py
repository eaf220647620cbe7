"""Isolation of the engines' prefix caches by owner."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import check_score
from engine.protocol.types import Branch, EngineClient, EngineError, ModelInfo, ScoreItem
from reasoner.jobs.spec import COMPARING_STRATEGY
from reasoner.run import run_job
from reasoner.strategies.registry import STRATEGIES
from tests.engine.helpers import generate, score
from tests.engine.remote.test_openai_compatible import chunks, collect, piece, scripted
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING
from tests.workers.store.helpers import end_delay
from workers.engines.tenant_isolation import BACKGROUND_PRIORITY, TenantEngine, owner_salt
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
PRM, JUDGE = {"kind": "prm", "model": "prm"}, {"kind": "judge", "model": "policy"}
PAIRWISE = {"kind": "pairwise", "model": "policy"}
ENDED = ("completed", "incomplete")


def spec(strategy: str, verifier: dict[str, str] = PRM, tokens: int = 1500) -> dict[str, Any]:
    params = {} if strategy == "greedy" else {"n": 4}
    told = {"problem": "Use the numbers 3, 7, 8 and 12 to reach 45.", "model": "policy", "seed": 1}
    asked = {"strategy": {"name": strategy} | params, "verifier": verifier, "budget": {"tokens": tokens}}
    return build_spec(told | asked).model_dump()


async def submit(store: JobStore, owner: str, job: dict[str, Any]) -> str:
    return str((await store.submit(job, owner=owner, queue_cap=10))[0]["id"])


async def wake(store: JobStore, job_id: str, engine: EngineClient) -> dict[str, Any]:
    await end_delay(store, job_id)
    await end_delay(store, job_id)
    await execute(
        job_id,
        store=store,
        engine=engine,
        run=run_job,
        shutting_down=asyncio.Event(),
        leases=Leases(store, 30),
        claims=ClaimQueue(store, lease=30, max_attempts=3),
    )
    return dict(await store.get(job_id))


@pytest.mark.parametrize("strategy", WRITING)
async def test_every_engine_request_of_a_job_has_the_salt_of_its_owner(store: JobStore, strategy: str) -> None:
    for verifier in (PRM, JUDGE) if strategy != COMPARING_STRATEGY else (PAIRWISE,):
        engine = ScriptedEngine()
        job = await wake(store, await submit(store, "ann", spec(strategy, verifier)), engine)
        assert job["status"] in ENDED
        assert {salt for _, salt in engine.salts} == {owner_salt("ann")}
        if STRATEGIES[strategy].needs_verifier:
            assert job["usage"]["verifier_computed"] > 0


async def test_a_job_continued_by_another_worker_keeps_its_salt(store: JobStore) -> None:
    first, second = ScriptedEngine(die_after=6), ScriptedEngine()
    job_id = await submit(store, "ann", spec("beam"))
    assert (await wake(store, job_id, first))["status"] == "queued"
    assert (await wake(store, job_id, second))["status"] in ENDED
    assert [{salt for _, salt in engine.salts} for engine in (first, second)] == [{owner_salt("ann")}] * 2


@pytest.mark.parametrize(("queue", "priority"), [("interactive", 0), ("batch", BACKGROUND_PRIORITY)])
async def test_requests_of_jobs_of_the_batch_queue_yield_to_others(store: JobStore, queue: str, priority: int) -> None:
    engine = ScriptedEngine()
    job = await wake(store, await submit(store, "ann", spec("beam") | {"priority": queue}), engine)
    assert job["status"] in ENDED
    assert {request.priority for request in engine.requests} == {priority}


def test_the_salt_is_stable_across_versions_and_short_enough_for_any_owner() -> None:
    assert owner_salt("ann") == "49915e0d7d4b402e3017d010bc1c0e83cac6c797d6c16e66340fe3268693a6a1"
    assert len({owner_salt(owner) for owner in ("ann", "bob", "local", "config", "a" * 64)}) == 5
    request = score(ScoreItem(((1,),), (0,)), token_ids=(1,))
    check_score(replace(request, cache_salt=owner_salt("a" * 64)), ModelInfo("m", "generate", 8, 8, 0), 8)


async def test_cached_prefixes_are_shared_within_an_owner_and_not_between_owners(store: JobStore) -> None:
    """Run the same job four times on the bundled models: the first job of each owner finds nothing cached."""
    models = {name: BUNDLED / name for name in ("policy", "prm")}
    engine = LocalEngine(models, EngineOptions(kv_tokens=16384, deterministic=True))
    try:
        usage: dict[str, list[dict[str, int]]] = {"ann": [], "bob": []}
        for owner in ("ann", "bob", "ann", "bob"):
            job = await wake(store, await submit(store, owner, spec("best_of_n", tokens=4000)), engine)
            usage[owner].append(job["usage"])
    finally:
        await engine.close()
    (ann, ann_again), (bob, bob_again) = usage.values()
    for kind in ("cached", "verifier_cached"):
        assert bob[kind] == ann[kind]
        assert bob_again[kind] == ann_again[kind] > ann[kind]


class Mixed(ScriptedEngine):
    """Engine whose policy's server does not isolate caches."""

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        return [ModelInfo(policy.id, policy.kind, policy.context, 100, 1000, isolates=False), prm]


async def test_a_model_whose_server_cannot_isolate_owners_is_requested_without_a_salt(store: JobStore) -> None:
    engine = Mixed()
    job = await wake(store, await submit(store, "ann", spec("beam")), engine)
    assert job["status"] in ENDED
    assert engine.salts == {("policy", None), ("prm", owner_salt("ann"))}


async def test_a_plain_server_gets_no_salt_and_refuses_a_request_with_one() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return chunks(piece("a", finish_reason="length"))

    client = scripted("llamacpp", answer, tokenizer=BUNDLED / "policy")
    engine, request = TenantEngine(client, "ann"), generate((5, 6), [Branch(1, 1, 9)])
    with pytest.raises(EngineError, match="cannot keep caches apart by cache_salt"):
        await collect(engine, request)
    assert [info.isolates for info in await engine.models()] == [False]
    assert len(await collect(engine, request)) == 1
    assert ["cache_salt" in body for body in bodies] == [False]
    await client.close()
