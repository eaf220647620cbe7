"""Limits: the token bucket against exact arithmetic, quotas against a model, both against races on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry
from tests.workers.store.helpers import SPEC, claim
from workers.config.rate_limits import Limits, LimitsTable, Quota, QuotaExceeded
from workers.config.settings import load_settings
from workers.config.types import ConfigError
from workers.store import redis_client
from workers.store.batches import BatchStore
from workers.store.jobs import JobStore

RESULT = JobResult(answer=None, text=None, confidence=None, finish_reason="no_answer", node=None)
DAY = 86_400
ADMIT = redis_client.read_scripts()["admit"]


@contextlib.asynccontextmanager
async def crowd(url: str) -> AsyncIterator[list[JobStore]]:
    """Access of several processes to one store."""
    stores = [JobStore(url, retry_seconds=30) for _ in range(6)]
    yield stores
    for each in stores:
        await each.close()


class Clock:
    """The time returned by the server's TIME command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 1_700_000_000_000
        # Half a millisecond more, so that rounding does not give the millisecond before.
        monkeypatch.setattr(time, "time", lambda: (self.ms + 0.5) / 1000)


@settings(deadline=None, derandomize=True, database=None)
@given(
    rate=st.sampled_from([Fraction(1, 8), Fraction(1, 2), Fraction(1), Fraction(4), Fraction(125), Fraction(1000)]),
    burst=st.integers(1, 20),
    pauses=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 20_000)), min_size=1, max_size=40),
)
@example(rate=Fraction(1), burst=2, pauses=[0, 0, 0, 999, 1, 1000, 0])
def test_the_token_bucket_equals_the_textbook_definition(rate: Fraction, burst: int, pauses: list[int]) -> None:
    """Compare with fractions, for rates and times that are exact in binary arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        clock, server = Clock(patch), fakeredis.FakeRedis(decode_responses=True)
        admit = server.register_script(ADMIT)
        tokens = Fraction(burst)
        for pause in pauses:
            clock.ms += pause
            tokens = min(Fraction(burst), tokens + pause * rate / 1000)
            allowed = tokens >= 1
            tokens -= allowed
            admitted, left, wait, full = admit(args=["k", repr(float(rate)), burst])
            assert (bool(admitted), left) == (allowed, int(tokens))
            assert wait == max(0, math.ceil((1 - tokens) / rate * 1000))
            assert full == math.ceil((burst - tokens) / rate * 1000)


def test_a_clock_set_back_at_most_empties_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, server = Clock(monkeypatch), fakeredis.FakeRedis(decode_responses=True)
    admit = server.register_script(ADMIT)
    assert admit(args=["k", "0.5", 3]) == [1, 2, 0, 2000]
    clock.ms -= 3_600_000
    assert admit(args=["k", "0.5", 3]) == [0, 0, 2000, 6000]
    clock.ms += 2000
    assert admit(args=["k", "0.5", 3])[0] == 1


async def test_concurrent_calls_never_exceed_the_bucket(store: JobStore, url: str) -> None:
    async def hurry(each: JobStore) -> int:
        return sum([(await each.script("admit", "k", "0.5", 7))[0] for _ in range(15)])

    async with crowd(url) as others:
        before = await store.get_broker_time()
        admitted = sum(await asyncio.gather(*map(hurry, others)))
        took = await store.get_broker_time() - before
    assert 7 <= admitted <= 7 + took * 0.5 + 1
    assert (await store.script("admit", "other", "0.5", 7))[0], "a key's bucket is its own"


def spec(tokens: int) -> dict[str, Any]:
    return SPEC | {"budget": {"tokens": tokens}}


async def test_concurrent_submissions_never_exceed_the_quota(store: JobStore, url: str) -> None:
    async def attempt(each: JobStore, owner: str, quota: Quota) -> bool:
        try:
            await each.submit(spec(10), owner=owner, queue_cap=1000, quota=quota)
        except QuotaExceeded:
            return False
        return True

    async def hurry(each: JobStore, owner: str, quota: Quota) -> int:
        return sum([await attempt(each, owner, quota) for _ in range(3)])

    async with crowd(url) as others:
        for owner, quota in (("ann", Quota(jobs=5)), ("bob", Quota(tokens_a_day=59)), ("cem", Quota(3, 1000))):
            taken = await asyncio.gather(*(hurry(each, owner, quota) for each in others))
            assert sum(taken) == {"ann": 5, "bob": 5, "cem": 3}[owner]


async def booked(store: JobStore, owner: str = "ann") -> int:
    keys = await store.command("KEYS", f"reasoner:quota:{owner}:*")
    assert len(keys) <= 1
    return int(await store.command("GET", keys[0])) if keys else 0


async def spend(store: JobStore, job_id: str, tokens: int, status: str = "completed") -> None:
    held = await claim(store, job_id)
    entry = Entry(f"k{tokens}", "node", {}, Usage(generated=tokens - 1, verifier_computed=1, prompt=99), 0.0)
    await store.commit(held, [entry])
    assert await store.finish(held, status, result=RESULT)


async def test_a_job_reserves_its_budget_and_commits_what_it_spent(store: JobStore) -> None:
    quota = Quota(tokens_a_day=100)
    job, _ = await store.submit(spec(60), owner="ann", queue_cap=9, quota=quota)
    assert await booked(store) == 60
    with pytest.raises(QuotaExceeded, match="60 of 100 tokens") as caught:
        await store.submit(spec(41), owner="ann", queue_cap=9, quota=quota)
    assert 0 < caught.value.retry_after <= DAY
    await store.submit(spec(100), owner="bob", queue_cap=9, quota=quota)
    await spend(store, job["id"], 25)
    assert await booked(store) == 25
    second, _ = await store.submit(spec(75), owner="ann", queue_cap=9, quota=quota)
    await store.cancel(second["id"])
    assert await booked(store) == 25
    await store.delete(second["id"])
    assert await booked(store) == 25


async def test_a_refused_job_reserves_and_records_nothing(store: JobStore) -> None:
    for quota in (Quota(jobs=1, tokens_a_day=50), Quota(jobs=0, tokens_a_day=100)):
        with pytest.raises(QuotaExceeded):
            await store.submit(spec(60), owner="ann", queue_cap=9, idempotency=("k", "d"), quota=quota)
    assert await booked(store) == 0
    assert (await store.list_jobs(owner=None, after=None, limit=9)).jobs == []
    _, created = await store.submit(spec(60), owner="ann", queue_cap=9, idempotency=("k", "d"), quota=Quota(1, 60))
    assert created
    _, created = await store.submit(spec(60), owner="ann", queue_cap=9, idempotency=("k", "d"), quota=Quota(1, 60))
    assert not created, "what is answered again is not charged again"
    assert await booked(store) == 60


async def test_a_retried_job_is_charged_once_for_all_that_it_spent(store: JobStore) -> None:
    job, _ = await store.submit(spec(60), owner="ann", queue_cap=9, quota=Quota(tokens_a_day=100))
    await spend(store, job["id"], 20, status="failed")
    assert await booked(store) == 20
    await store.retry(job["id"], queue_cap=9)
    await spend(store, job["id"], 30)
    assert await booked(store) == 50


async def test_a_retry_is_limited_by_the_quota_for_its_remaining_budget(store: JobStore) -> None:
    quota = Quota(jobs=2, tokens_a_day=100)
    failed, _ = await store.submit(spec(60), owner="ann", queue_cap=9, quota=quota)
    await spend(store, failed["id"], 20, status="failed")
    other, _ = await store.submit(spec(50), owner="ann", queue_cap=9, quota=quota)
    with pytest.raises(QuotaExceeded, match="70 of 100 tokens"):  # and it may spend 40 more
        await store.retry(failed["id"], queue_cap=9, quota=quota)
    with pytest.raises(QuotaExceeded, match="1 jobs"):
        await store.retry(failed["id"], queue_cap=9, quota=Quota(jobs=1))
    assert (await store.get(failed["id"]))["status"] == "failed"
    assert await booked(store) == 70
    await spend(store, other["id"], 40)
    await store.retry(failed["id"], queue_cap=9, quota=quota)
    assert await booked(store) == 40 + 60
    await spend(store, failed["id"], 25)
    assert await booked(store) == 40 + 45


async def test_a_batch_reserves_its_budget_and_commits_what_its_jobs_spent(store: JobStore) -> None:
    batches, quota = BatchStore(store), Quota(jobs=3, tokens_a_day=100)

    async def submit(count: int, tokens: int) -> list[str]:
        made, _ = await batches.submit([SPEC] * count, {"tokens": tokens}, {}, owner="ann", queue_cap=9, quota=quota)
        return [job["id"] for job in made["jobs"]]

    with pytest.raises(QuotaExceeded, match="0 jobs are unfinished, and the limit is 3"):
        await submit(4, 50)
    with pytest.raises(QuotaExceeded, match="0 of 100"):
        await submit(3, 101)
    first, second = await submit(2, 80)
    assert await booked(store) == 80
    await spend(store, first, 9)
    assert await booked(store) == 80
    await store.cancel(second)
    assert await booked(store) == 9
    await submit(3, 91)


def without_fields(answer: list[Any]) -> list[Any]:
    """Return the answer to a submission without the job's fields."""
    return answer[:2] if answer[0] == "created" else answer


async def test_a_job_that_ends_on_the_next_day_is_charged_to_its_first_day(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.ms = 1_700_006_399_000  # 2023-11-14 23:59:59 UTC
    server = fakeredis.FakeRedis(decode_responses=True)
    sources = redis_client.read_scripts()
    submit, cancel = (server.register_script(sources[name]) for name in ("submit", "cancel"))
    body, quota = '{"budget":{"tokens":60}}', Quota(tokens_a_day=100).to_json()

    def attempt(job_id: str) -> Any:
        return without_fields(submit(args=[job_id, body, "batch", "ann", "", 99, "", "", "", quota]))

    assert attempt("job_1") == ["created", "job_1"]
    assert attempt("job_2") == ["tokens", 60, 1]
    clock.ms += 1000
    assert attempt("job_3") == ["created", "job_3"]
    cancel(args=["job_1", "null"])
    assert attempt("job_4") == ["tokens", 60, DAY]
    yesterday, today = sorted(server.keys("reasoner:quota:ann:*"))
    assert (server.get(yesterday), server.get(today)) == ("0", "60")
    assert 0 < server.ttl(yesterday) <= 2 * DAY


def test_limits_of_an_owner_override_those_of_all_owners() -> None:
    table = LimitsTable.model_validate({"n": 8, "jobs": 2, "ann": {"n": 64}, "bob": {"requests_per_second": 2.5}})
    assert (table.for_owner("ann").n, table.for_owner("ann").jobs, table.for_owner("cem").n) == (64, 2, 8)
    assert table.for_owner("bob").bucket == (2.5, 3)
    assert table.for_owner("cem") == Limits(n=8, jobs=2)
    assert LimitsTable().for_owner("ann") == Limits()


def test_limits_are_read_from_the_file_and_passed_on_to_the_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reasoner.toml").write_text("[limits]\ntokens = 500\n[limits.ann]\ntokens = 900\nburst = 3\n")
    given = load_settings(limits=load_settings().limits)
    monkeypatch.setenv("REASONER_LIMITS", given.environment()["REASONER_LIMITS"])
    (tmp_path / "reasoner.toml").unlink()
    handed = load_settings()
    assert handed.limits == given.limits
    ann = handed.limits.for_owner("ann")
    assert (ann.tokens, ann.burst, handed.limits.for_owner("x").tokens) == (900, 3, 500)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[limits]\ntoken = 5", "no limit 'token'; known are requests_per_second"),
        ("[limits.ann]\ntoken = 5", "unknown setting 'token'; known settings: burst"),
        ("[limits]\nn = 0", "greater than or equal to 1"),
        ("[limits.ann]\nseconds = -1", "limits.ann.seconds"),
        ("[limits.ann]\nweight = 0", "limits.ann.weight: Input should be greater than or equal to 0.001"),
        ("[limits.ann]\nrunning = 0", "limits.ann.running: Input should be greater than or equal to 1"),
        ("[limits]\nweight = -1", "limits.weight: Input should be greater than or equal to 0.001"),
        ("limits = 5", "limits"),
    ],
)
def test_an_invalid_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, hint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reasoner.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert hint in str(caught.value)


def test_the_real_server_and_the_fake_agree_on_quotas(url: str) -> None:
    body, quota = '{"budget":{"tokens":60}}', Quota(2, 130).to_json()
    answers = []
    for server in (redis.Redis.from_url(url, decode_responses=True), fakeredis.FakeRedis(decode_responses=True)):
        submit = server.register_script(redis_client.read_scripts()["submit"])
        with server:
            calls = [
                without_fields(submit(args=[f"job_{n}", body, "batch", "ann", "", 99, "", "", "", quota]))
                for n in range(3)
            ]
            calls.append(submit(args=["job_9", body, "batch", "bob", "", 99, "", "", "", Quota(2, 59).to_json()])[:2])
        answers.append(calls)
    assert answers[0] == answers[1] == [["created", "job_0"], ["created", "job_1"], ["jobs", 2, 0], ["tokens", 0]]
