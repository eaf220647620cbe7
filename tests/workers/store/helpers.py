"""Jobs, claims and journal entries for tests of the store."""

from __future__ import annotations

from typing import Any

import redis

from reasoner.budget.usage import Usage
from reasoner.jobs.events import read_data
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry
from tests.specs import build_spec
from workers.store.claims import Claim
from workers.store.jobs import JobStore

SPEC: dict[str, Any] = build_spec(problem="1 + 1?", strategy={"name": "greedy"}, seed=7).model_dump()

RESULT = JobResult(answer="2", text="\\boxed{2}", confidence=None, finish_reason="answer", node="0")


async def submit(store: JobStore, **options: Any) -> str:
    job, _ = await store.submit(
        SPEC, owner=options.pop("owner", "local"), queue_cap=options.pop("queue_cap", 1000), **options
    )
    return str(job["id"])


async def claim(store: JobStore, job_id: str, worker: str = "w1", lease: float = 60.0) -> Claim:
    held = await store.claim(job_id, lease=lease, max_attempts=3, worker=worker)
    assert held is not None
    return held


def expire(url: str, job_id: str) -> None:
    """Expire the lease, as if the worker had been silent for longer."""
    with redis.Redis.from_url(url) as client:
        client.hset(f"reasoner:job:{job_id}", "lease", 1)
        client.zadd("reasoner:due", {job_id: 1})


def age_messages(url: str) -> None:
    """Let so much time pass that messages which have left the queue, and whose worker has claimed nothing, are lost."""
    with redis.Redis.from_url(url) as client:
        client.hset("reasoner:sent", mapping={"interactive:at": 1, "batch:at": 1})


async def end_delay(store: JobStore, job_id: str) -> None:
    """Make a released job ready, as if its delay were over."""
    if await store.command("ZADD", "reasoner:due", "XX", "CH", 1, job_id):
        await store.reap(1000)


async def claim_again(store: JobStore, url: str, job_id: str) -> Claim:
    """Claim the job for the next worker; the previous one, if any, counts as dead."""
    expire(url, job_id)
    return await claim(store, job_id)


def solution(name: str, answer: str) -> Entry:
    text = f"\\boxed{{{answer}}}"
    data = {"node": name, "parent": "", "text": text, "tokens": 5, "logprob": -1.0, "final": True}
    data |= {"reason": "stop", "answer": answer}
    return Entry(f"complete:{name}:0", "node", data, Usage(generated=5), 1.0)


def entry(key: str, tokens: int = 3) -> Entry:
    return Entry(key, "node", {"node": key, "tokens": tokens}, Usage(generated=tokens, seconds=0.25), 1.5)


async def types(store: JobStore, job_id: str) -> list[str]:
    events = await store.load_events(job_id)
    for event in events:
        if event.type.startswith("job."):  # entries are made up here, and checked in the tests of the search
            read_data(event.type, event.data)
    return [event.type for event in events]
