"""Jobs in Redis. Every change is one Lua script (``workers/store/lua``), so that it happens once and whole, or not at
all."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff

from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.event import Event
from reasoner.jobs.job import TERMINAL_STATUSES, JobError, JobResult
from reasoner.jobs.journal import Entry
from reasoner.jobs.spec import JobSpec
from workers.config.rate_limits import Quota
from workers.store import serialization
from workers.store.request_origin import ORIGIN, Origin
from workers.store.serialization import JobDocument

BROKER_DOWN: Final = (exceptions.ConnectionError, exceptions.TimeoutError)
"""What the Redis client raises while the broker cannot answer."""

TERMINAL_EVENTS: Final = frozenset(f"job.{status}" for status in TERMINAL_STATUSES)
DEAD: Final = "dead"
"""A filter of a list of jobs beside the statuses: failed jobs that kept losing their worker without progress."""

RESEND_SECONDS = 5.0
_LUA = Path(__file__).parent / "lua"
_SCRIPTS = tuple(sorted(path.stem for path in _LUA.glob("*.lua") if path.stem != "common"))
_BLOCK_SECONDS = 5.0
_REAP_LIMIT = 1000
_EXPIRE_LIMIT = 100
_PAGE = 100
_LOG_PAGE = 200
_CONNECTIONS = 1000
"""At most, of each kind: every client that follows a job holds one."""


class QueueFull(Exception):
    """As many jobs wait as may."""


class IdempotencyConflict(Exception):
    """The same idempotency key came with another body."""


class NoSuchJob(Exception):
    """There is no job with this id."""


class JobActive(Exception):
    """Only a job that has ended can be deleted."""


class ShuttingDown(Exception):
    """The process that waits for a job is about to end; the job goes on."""


class NotRetryable(Exception):
    """The job has not failed, or what it would need has gone; the message says which."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a job may spend of its batch's budget: tokens over all of its life, and whether there will be no more."""

    granted: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to run a job: every write names the token."""

    job_id: str
    token: int
    attempt: int
    owner: str
    spec: dict[str, Any]
    lease: float
    """Seconds of silence after which the worker is taken for dead: from the claim, or from its last write."""
    origin: Origin = field(default_factory=Origin)
    share: Share | None = None
    """Of a job of a batch."""

    @property
    def lease_ms(self) -> int:
        """The lease as the scripts take it."""
        return round(self.lease * 1000)


Beat = Literal["ok", "cancel", "lost"]


class JobStore:
    """One event loop's access to the jobs.

    ``patience`` is for how many seconds a call outlasts a broker that is away: none in an API, which answers 503 and
    recovers by itself, some in a worker, whose work would be lost.
    """

    def __init__(self, url: str, *, patience: float = 0.0) -> None:
        tries = round(patience)
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), tries) if tries else Retry(NoBackoff(), 0)
        timeout = 5.0 if tries else 0.8
        self._redis = _connect(url, timeout, retry)
        # Blocking reads answer late by design and must not share the short timeout of the others.
        self._blocking = _connect(url, _BLOCK_SECONDS + 5, Retry(NoBackoff(), 0))
        self._closing = asyncio.Event()
        self._scripts = {name: self._redis.register_script(text) for name, text in _sources().items()}

    async def close(self) -> None:
        await self._redis.aclose()
        await self._blocking.aclose()

    def stop_waiting(self) -> None:
        """End every wait for a job: this process is about to end. What is known by then is still told."""
        self._closing.set()

    async def ping(self) -> None:
        """Raises one of ``BROKER_DOWN`` when the broker does not answer."""
        await self.command("PING")

    # Clients.

    async def submit(
        self,
        spec: dict[str, Any],
        *,
        owner: str,
        queue_cap: int,
        idempotency: tuple[str, str] | None = None,
        form: str = "",
        quota: Quota | None = None,
    ) -> tuple[JobDocument, bool]:
        """Records a job; answers it and whether it is new. ``idempotency`` is a client's key and its body's digest,
        ``form`` what the route wants to know of the request later, ``quota`` what the owner's jobs may take: one of
        tokens needs a budget of tokens.

        Raises ``QueueFull``, ``IdempotencyConflict``, ``QuotaExceeded``.
        """
        key, digest = idempotency_record("job", owner, idempotency)
        job_id = new_id("job")
        body = json.dumps(spec, separators=(",", ":"))
        origin, allowed = ORIGIN.get().to_json(), quota or Quota()
        outcome, *known = await self.script(
            "submit", job_id, body, spec["priority"], owner, origin, queue_cap, key, digest, form, allowed.to_json()
        )
        if outcome == "full":
            raise QueueFull(f"{queue_cap} jobs are waiting")
        if outcome in ("jobs", "tokens"):
            raise allowed.exceeded(outcome, *map(int, known))
        if outcome == "conflict":
            raise IdempotencyConflict(f"this key was used for {known[0]} with another body")
        return await self.get(known[0]), bool(outcome == "created")

    async def check_owner(self, job_id: str, owner: str | None) -> None:
        """Raises ``NoSuchJob`` for a job of somebody else; ``None`` may see everybody's.

        Methods that take a job's id trust it: whoever gets one from a client asks here first. An owner never changes,
        so the answer stays true.
        """
        if owner is not None and await self.command("HGET", _job(job_id), "owner") != owner:
            raise NoSuchJob(job_id)

    async def get(self, job_id: str) -> JobDocument:
        """Raises ``NoSuchJob``."""
        fields = await self.command("HGETALL", _job(job_id))
        if not fields:
            raise NoSuchJob(job_id)
        return serialization.document(fields)

    async def form(self, job_id: str) -> str | None:
        """What ``submit`` was given as such; ``None`` for nothing, and for a job that there is not."""
        form: str | None = await self.command("HGET", _job(job_id), "form")
        return form

    async def page(self, *, owner: str | None, after: str | None, limit: int, status: str | None) -> list[JobDocument]:
        """Newest first, from before the job ``after``. Raises ``NoSuchJob`` when there is none like that.

        ``owner``: whose; ``None`` for everybody's.
        """
        rows = await self.script("list", owner or "", after or "", limit, status or "")
        if rows is None:
            raise NoSuchJob(after)
        return [serialization.document(dict(zip(row[::2], row[1::2], strict=True))) for row in rows]

    async def cancel(self, job_id: str) -> JobDocument:
        """Cancels; a job that has ended stays as it is. Raises ``NoSuchJob``."""
        if await self.script("cancel", job_id, await self.best_so_far(job_id)) == "gone":
            raise NoSuchJob(job_id)
        return await self.get(job_id)

    async def best_so_far(self, job_id: str) -> str:
        """The result (JSON) that an unfinished job's journal allows: ``null`` where a search has not begun. A job that
        waits has no worker that could tell; of one that runs it counts if its worker is lost."""
        status, spec = await self.command("HMGET", _job(job_id), "status", "spec")
        if status is None or status in TERMINAL_STATUSES:
            return "null"
        entries = await self.entries(job_id)
        try:
            result = choose_best_so_far(JobSpec.model_validate_json(spec), entries) if entries else None
        except ValidationError:  # of another version: no worker could run it either
            return "null"
        return "null" if result is None else result.model_dump_json()

    async def delete(self, job_id: str) -> None:
        """Raises ``NoSuchJob``, ``JobActive``."""
        outcome = await self.script("delete", job_id)
        if outcome == "gone":
            raise NoSuchJob(job_id)
        if outcome == "active":
            raise JobActive(job_id)

    async def owner(self, job_id: str) -> str:
        """Whose job it is. Raises ``NoSuchJob``."""
        owner = await self.command("HGET", _job(job_id), "owner")
        if owner is None:
            raise NoSuchJob(job_id)
        return str(owner)

    async def retry(self, job_id: str, *, queue_cap: int, quota: Quota | None = None) -> JobDocument:
        """Queues a failed job again, with the journal that it has. ``quota`` is its owner's, as for ``submit``.

        Raises ``NoSuchJob``, ``NotRetryable``, ``QueueFull``, ``QuotaExceeded``.
        """
        allowed = quota or Quota()
        outcome, *known = await self.script("retry", job_id, queue_cap, allowed.to_json())
        match outcome:
            case "ok":
                return await self.get(job_id)
            case "gone":
                raise NoSuchJob(job_id)
            case "full":
                raise QueueFull(f"{queue_cap} jobs are waiting")
            case "jobs" | "tokens":
                raise allowed.exceeded(outcome, *map(int, known))
            case "shared":
                raise NotRetryable(
                    "its batch was cancelled, or what it had of the shared budget has gone to other jobs"
                )
            case status:
                raise NotRetryable(f"only a failed job can be retried, and this one is {status}")

    async def now(self) -> float:
        """The broker's clock, by which all times of jobs are: seconds since the epoch."""
        seconds, micros = await self.command("TIME")
        return int(seconds) + int(micros) / 1e6

    async def ended(self, owner: str | None, since: float, until: float) -> AsyncIterator[str]:
        """Ids of jobs that ended in this time, in the order of their ends: an owner's, or with ``None`` everybody's.

        Each comes once, whatever ends or is deleted meanwhile.
        """
        lowest, last = round(since * 1000), math.floor(until * 1000)
        seen: set[str] = set()  # of those that ended in the lowest millisecond: many may, when a batch is cancelled
        while True:
            rows = await self.script("ended", owner or "", lowest, last, len(seen) + _PAGE)
            pairs = zip(rows[::2], map(int, rows[1::2]), strict=True)
            fresh = [(job_id, ended) for job_id, ended in pairs if job_id not in seen]
            for job_id, ended in fresh:
                if ended > lowest:
                    lowest, seen = ended, set()
                seen.add(job_id)
                yield job_id
            if not fresh:
                return

    async def events(self, job_id: str, after: int = 0) -> list[Event]:
        """What the job's stream holds now, from the event behind ``after``."""
        return [serialization.event(entry_id, fields) for entry_id, fields in await self._log(job_id, after)]

    async def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Events behind ``after`` as they come, to the terminal one. Outlasts a broker that is away.

        Ends early when the job is deleted. A terminal event behind which a retried job went on is one among others.
        Raises ``ShuttingDown`` when ``stop_waiting`` ends the wait.
        """
        ended = False
        while True:
            try:
                rows = await self._log_page(job_id, after)
                if not rows:
                    if ended or not await self.command("EXISTS", _job(job_id)):
                        return
                    rows = await self._await_events(job_id, after)
            except BROKER_DOWN:
                await asyncio.sleep(0.5)
                rows = []
            for entry_id, fields in rows:
                event = serialization.event(entry_id, fields)
                after = event.seq
                ended = event.type in TERMINAL_EVENTS
                yield event
            if self._closing.is_set() and not ended:
                raise ShuttingDown(job_id)

    async def wait(self, job_id: str, seconds: float) -> JobDocument:
        """The job as it is when it has ended or when the time is over. Raises ``NoSuchJob``."""
        job = await self.get(job_id)
        if job["status"] in TERMINAL_STATUSES or seconds <= 0:
            return job
        with contextlib.suppress(TimeoutError, ShuttingDown):
            async with asyncio.timeout(seconds):
                async for _ in self.follow(job_id, job["last_seq"]):
                    pass
        return await self.get(job_id)

    # Workers.

    async def claim(self, job_id: str, *, lease: float, max_attempts: int, worker: str) -> Claim | None:
        """Takes a job over; ``None`` when there is nothing to do: it has ended, or another worker runs it."""
        outcome, *claim = await self.script("claim", job_id, round(lease * 1000), max_attempts, worker)
        if outcome != "claimed":
            return None
        token, attempt, owner, spec, origin, granted, share = claim
        of_batch = None if granted is None else Share(int(granted), share == "closed")
        return Claim(job_id, token, attempt, owner, json.loads(spec), lease, Origin.from_json(origin or "{}"), of_batch)

    async def heartbeat(self, claim: Claim) -> Beat:
        """Renews the lease."""
        beat: Beat = await self.script("heartbeat", claim.job_id, claim.token, claim.lease_ms)
        return beat

    async def commit(self, claim: Claim, entries: Sequence[Entry]) -> Beat:
        """Appends to the journal and to the bill, and renews the lease; ``lost`` when nothing was written. May be
        repeated."""
        parts: list[str] = []
        for entry in entries:
            spend = {name: value for name, value in entry.spend.model_dump().items() if value}
            parts += [entry.key, entry.type, _json(entry.data), repr(entry.elapsed), _json(spend)]
        beat: Beat = await self.script("commit", claim.job_id, claim.token, claim.lease_ms, *parts)
        return beat

    async def finish(
        self, claim: Claim, status: str, *, result: JobResult | None = None, error: JobError | None = None
    ) -> bool:
        """Ends the job; ``False`` when it has another owner or has ended."""
        result_json = "null" if result is None else result.model_dump_json()
        error_json = "null" if error is None else error.model_dump_json()
        return bool(await self.script("finish", claim.job_id, claim.token, status, result_json, error_json) == "ok")

    async def release(self, claim: Claim, *, reason: str, detail: str, delay: float = 0.0) -> bool:
        """Hands the job back to the queue without using up an attempt."""
        outcome = await self.script("release", claim.job_id, claim.token, round(delay * 1000), reason, detail)
        return bool(outcome == "ok")

    async def entries(self, job_id: str) -> list[Entry]:
        """The journal: events that carry a key."""
        return [serialization.entry(fields) for _, fields in await self._log(job_id, 0) if "key" in fields]

    # Reaper and metrics.

    async def reap(self, max_attempts: int) -> list[tuple[str, str]]:
        """Jobs that need a wake-up now, with their queues."""
        rows = await self.script("reap", _REAP_LIMIT, round(RESEND_SECONDS * 1000), max_attempts)
        return [(job_id, queue) for job_id, queue in rows]

    async def waits_for_engine(self) -> bool:
        """Return whether there may be jobs that were handed back because no engine answered."""
        return bool(await self.command("EXISTS", "reasoner:waiting"))

    async def wake_for_engine(self) -> int:
        """Make those jobs due now; return how many they were."""
        return int(await self.script("wake"))

    async def expire(self, keep: float) -> int:
        """Forgets jobs that ended more than ``keep`` seconds ago, not all of them at once; answers how many."""
        return int(await self.script("expire", round(keep * 1000), _EXPIRE_LIMIT))

    async def stats(self) -> tuple[dict[str, int], dict[str, float]]:
        """Number of jobs by status, of dead ones too, and the counters over all jobs so far."""
        statuses = ("queued", "in_progress", *sorted(TERMINAL_STATUSES), DEAD)
        counts = [await self.command("ZCARD", f"reasoner:jobs:{status}") for status in statuses]
        counters = await self.command("HGETALL", "reasoner:stats")
        return dict(zip(statuses, counts, strict=True)), {name: float(value) for name, value in counters.items()}

    async def count(self, counters: Mapping[str, int]) -> None:
        """Adds to the counters of ``stats``."""
        for name, count in counters.items():
            await self.command("HINCRBY", "reasoner:stats", name, count)

    async def _log(self, job_id: str, after: int) -> list[Any]:
        rows: list[Any] = []
        while page := await self._log_page(job_id, after):
            rows += page
            after = int(page[-1][0].removesuffix("-0"))
        return rows

    async def _log_page(self, job_id: str, after: int) -> list[Any]:
        """Some of the stream: the whole of a long one takes longer to read than a command may."""
        page: list[Any] = await self.command("XRANGE", f"{_job(job_id)}:log", f"({after}-0", "+", "COUNT", _LOG_PAGE)
        return page

    async def _await_events(self, job_id: str, after: int) -> list[Any]:
        log, start, block = f"{_job(job_id)}:log", f"{after}-0", round(_BLOCK_SECONDS * 1000)
        reading = asyncio.ensure_future(
            self._blocking.execute_command(  # type: ignore[no-untyped-call]
                "XREAD", "COUNT", _LOG_PAGE, "BLOCK", block, "STREAMS", log, start
            )
        )
        reading.add_done_callback(_heard)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            # Never cancelled, for the reason that ``_whole`` gives; left alone, it ends by itself.
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        answer = reading.result() if reading.done() else None
        return list(answer[0][1]) if answer else []

    async def command(self, *command: str | int) -> Any:
        """One command of Redis."""
        return await _whole(self._redis.execute_command(*command))  # type: ignore[no-untyped-call]

    async def script(self, script: str, *arguments: str | int) -> Any:
        """Runs one of ``workers/store/lua``."""
        return await _whole(self._scripts[script](args=arguments))


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def idempotency_record(kind: str, owner: str, idempotency: tuple[str, str] | None) -> tuple[str, str]:
    """Where an owner's key is remembered for this kind of thing, and the body's digest; empty without a key."""
    if idempotency is None:
        return "", ""
    key, digest = idempotency
    return f"reasoner:idempotency:{kind}:{owner}:{hashlib.sha256(key.encode()).hexdigest()}", digest


async def _whole(operation: Coroutine[Any, Any, Any]) -> Any:
    """Awaits a command to its end even when the caller is cancelled, and only then lets the cancellation go on.

    A command that is cut off costs its connection. Worse, redis-py writes under ``asyncio.wait_for``, which in Python
    3.11 can swallow a cancellation (cpython #86296): a task that should have ended would go on for ever.
    """
    running = asyncio.ensure_future(operation)
    running.add_done_callback(_heard)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _heard(ended: asyncio.Future[Any]) -> None:
    """Takes note of an error that whoever asked may not be there to hear: the event loop would log it."""
    if not ended.cancelled():
        ended.exception()


@functools.cache
def _sources() -> dict[str, str]:
    common = (_LUA / "common.lua").read_text()
    return {name: common + (_LUA / f"{name}.lua").read_text() for name in _SCRIPTS}


def _connect(url: str, timeout: float, retry: Retry) -> Redis:
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        max_connections=_CONNECTIONS,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=retry,
    )
    return client


def _job(job_id: str) -> str:
    return f"reasoner:job:{job_id}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
