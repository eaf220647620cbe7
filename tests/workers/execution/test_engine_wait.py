"""An engine that fails for ever: a job waits as long as it may, then ends with what it has, whoever runs it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from engine.protocol.types import EngineBusy, EngineClient, EngineUnavailable
from reasoner.budget.usage import Usage
from reasoner.jobs.job import Job
from reasoner.jobs.journal import Entry, Journal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.workers.store.helpers import end_delay
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

WORDS = "the answer of the engine at http://hosted is not an OpenAI completion: content-type text/html"


def node(name: str, text: str, answer: str | None, reason: str | None = "stop") -> Entry:
    data = {"node": name, "parent": "", "part": 0, "text": text, "token_ids": [], "tokens": 2, "cached": 0}
    data |= {"logprob": -1.0, "final": reason is not None, "reason": reason, "answer": answer, "answer_level": "strict"}
    return Entry(f"complete:{name}:0", "node", data | {"batch": 0}, Usage(generated=2), 1.0)


async def submit(store: JobStore, **fields: Any) -> str:
    spec = build_spec(problem="1 + 1?", model="policy", seed=1, **fields).model_dump()
    job, _ = await store.submit(spec, owner="local", queue_cap=10)
    return str(job["id"])


async def attempt(
    store: JobStore,
    job_id: str,
    entries: list[Entry] | None = None,
    error: EngineUnavailable | None = None,
    wait: float | None = 60.0,
) -> Job:
    """Run one attempt, which writes the entries before its engine fails, and return the job after it."""

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        known = {entry.key for entry in await journal.load()}
        if new := [entry for entry in entries or [] if entry.key not in known]:
            await journal.append(new)
        raise error or EngineUnavailable(WORDS)

    await end_delay(store, job_id)
    await execute(
        job_id,
        store=store,
        engine=ScriptedEngine(),
        run=run,
        shutting_down=asyncio.Event(),
        leases=Leases(store, 30),
        claims=ClaimQueue(store, lease=30, max_attempts=3),
        engine_wait=wait,
    )
    return Job.model_validate(await store.get(job_id))


def pass_time(url: str, job_id: str, seconds: float) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.hincrby(f"reasoner:job:{job_id}", "unserved", -round(seconds * 1000))


async def exhaust(store: JobStore, url: str, job_id: str, *, seconds: float = 61.0, **options: Any) -> Job:
    """Run three attempts, the last one after so many seconds."""
    for _ in range(2):
        assert (await attempt(store, job_id, **options)).status == "queued"
    pass_time(url, job_id, seconds)
    return await attempt(store, job_id, **options)


async def test_a_job_whose_engine_never_does_anything_fails_with_the_engines_words(store: JobStore, url: str) -> None:
    job = await exhaust(store, url, await submit(store))
    assert (job.status, job.result) == ("failed", None)
    assert job.error is not None
    assert job.error.code == "engine_unavailable"
    assert WORDS in job.error.message
    assert "61 s and 3 attempts" in job.error.message
    assert job.waiting is None
    assert (await store.load_events(job.id))[-1].type == "job.failed"


@pytest.mark.parametrize(
    ("entries", "status", "answer"),
    [
        ([node("0", "it is 2", "2"), node("1", "hm", None)], "completed", "2"),
        ([node("0", "an essay", None)], "completed", None),
        ([node("0", "cut o", None, "length")], "incomplete", None),
    ],
)
async def test_a_job_ends_with_what_it_has_paid_for(
    store: JobStore, url: str, entries: list[Entry], status: str, answer: str | None
) -> None:
    job = await exhaust(store, url, await submit(store, verifier=None), entries=entries)
    assert job.status == status
    assert job.error is None
    assert job.result is not None
    assert (job.result.answer, job.result.finish_reason) == (answer, "engine_unavailable")
    assert WORDS in (job.result.note or "")
    assert job.usage.generated == 2 * len(entries)


async def test_while_it_waits_a_job_says_for_what_and_so_do_its_events(store: JobStore) -> None:
    job_id = await submit(store)
    job = await attempt(store, job_id)
    assert job.waiting is not None
    assert (job.waiting.reason, job.waiting.detail, job.waiting.attempts) == ("engine_unavailable", WORDS, 1)
    await attempt(store, job_id)
    job = await attempt(store, job_id, error=EngineBusy("slow down"))
    assert job.waiting is not None
    assert (job.waiting.reason, job.waiting.detail, job.waiting.attempts) == ("engine_busy", "slow down", 3)
    queued = [event.data for event in await store.load_events(job_id) if event.type == "job.queued"]
    assert queued == [
        {},
        {"reason": "engine_unavailable", "detail": WORDS},  # told once
        {"reason": "engine_busy", "detail": "slow down"},
    ]


@pytest.mark.parametrize("error", [EngineUnavailable(WORDS), EngineBusy("limit", 60.0)])
async def test_time_and_attempts_are_both_needed(store: JobStore, url: str, error: EngineUnavailable) -> None:
    job_id = await submit(store)
    await attempt(store, job_id, error=error)
    pass_time(url, job_id, 3600)
    assert (await attempt(store, job_id, error=error)).status == "queued"  # it was in the queue all the time
    assert (await attempt(store, job_id, error=error)).status == "failed"


async def test_a_result_begins_the_wait_anew_and_unusable_tokens_do_not(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    for index in range(6):
        pass_time(url, job_id, 40) if index else None
        assert (await attempt(store, job_id, [node(str(index), "it is 2", "2")])).status == "queued"
    lost = [Entry(f"lost:{index}", "lost", {"node": "9", "tokens": 1}, Usage(generated=1), 1.0) for index in range(4)]
    pass_time(url, job_id, 61)
    await attempt(store, job_id, lost[:1])
    job = await attempt(store, job_id, lost[:2])
    assert (job.status, job.usage.generated) == ("completed", 14)


async def test_the_wait_of_a_job_takes_precedence(store: JobStore, url: str) -> None:
    patient = await submit(store, engine_wait_seconds=7200)
    assert (await exhaust(store, url, patient, seconds=3700, wait=60.0)).status == "queued"
    hasty = await submit(store, engine_wait_seconds=5)
    assert (await exhaust(store, url, hasty, seconds=5)).status == "failed"
    endless = await submit(store)
    assert (await exhaust(store, url, endless, seconds=1e6, wait=None)).status == "queued"


async def test_the_last_attempt_is_at_the_end_of_the_wait(store: JobStore) -> None:
    job_id = await submit(store)
    for _ in range(2):
        await attempt(store, job_id, error=EngineBusy("limit", 3600.0))
    due, now = await store.command("ZSCORE", "reasoner:due", job_id), await store.command("TIME")
    assert float(due) / 1000 - int(now[0]) < 61


async def test_a_failed_job_waits_anew_when_it_is_tried_again(store: JobStore, url: str) -> None:
    job = await exhaust(store, url, await submit(store))
    assert job.status == "failed"
    await store.retry(job.id, queue_cap=10)
    for _ in range(2):
        again = await attempt(store, job.id)
        assert again.status == "queued"
    assert again.waiting is not None
    assert again.waiting.attempts == 2


async def test_a_worker_that_dies_while_it_gives_up_leaves_that_to_the_next(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    for _ in range(2):
        await attempt(store, job_id)
    pass_time(url, job_id, 61)
    claim = await store.claim(job_id, lease=30, max_attempts=3, worker="dies")
    assert claim is not None
    given_up = await store.release(claim, reason="engine_unavailable", detail=WORDS, delay=3, patience=60)
    assert (given_up.outcome, given_up.count, bool(given_up)) == ("exhausted", 3, False)
    assert (await store.get(job_id))["status"] == "in_progress"
    with redis.Redis.from_url(url) as client:
        client.hset(f"reasoner:job:{job_id}", "lease", 0)
    assert (await attempt(store, job_id)).status == "failed"
