"""Claims of jobs by workers: taking a job, keeping its lease, writing its journal, ending it or handing it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reasoner.budget.grant_source import StoredGrants
from reasoner.jobs.job import JobError, JobResult
from reasoner.jobs.journal import Entry
from workers.store.redis_client import RedisClient
from workers.store.request_origin import Origin
from workers.store.serialization import to_json

LeaseState = Literal["ok", "cancel", "lost"]
"""``cancel``: the job was cancelled, so the worker must end it. ``lost``: another worker has the job, or it has
ended.
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to run a job. Every write carries its token, which fences off an earlier holder."""

    job_id: str
    token: int
    attempt: int
    owner: str
    spec: dict[str, Any]
    lease: float
    """The time in seconds after the claim, or after the worker's last write, at which the worker counts as lost."""
    origin: Origin = field(default_factory=Origin)
    has_journal: bool = True
    """False if no attempt has written anything yet."""
    share: StoredGrants | None = None
    """Its part of its batch's budget; ``None`` for a job that belongs to no batch."""

    @property
    def lease_ms(self) -> int:
        """The lease in the scripts' unit, milliseconds."""
        return round(self.lease * 1000)


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome of handing a job back.

    ``exhausted``: it has waited for its engine as long as it may, for ``waited`` seconds and ``count`` attempts, and
    its worker must end it.
    """

    outcome: Literal["ok", "lost", "exhausted"]
    count: int = 0
    waited: float = 0.0

    def __bool__(self) -> bool:
        """True if the job was handed back."""
        return self.outcome == "ok"


def list_beats(claims: Sequence[Claim]) -> list[str | int]:
    """Return the arguments of the script that renews leases."""
    return [part for claim in claims for part in (claim.job_id, claim.token, claim.lease_ms)]


class Claims(RedisClient):
    """The operations of workers."""

    async def claim(
        self, job_id: str, *, lease: float, max_attempts: int, worker: str, by_turn: bool = False
    ) -> Claim | None:
        """Take a job over. Return ``None`` when there is nothing to do: it has ended, or another worker runs it.

        ``by_turn``: take the job whose turn it is in the queue of ``job_id``, whose message is a free worker's; or that
        job itself, if its worker is lost.
        """
        [claim] = await self.claim_all([job_id], lease=lease, max_attempts=max_attempts, worker=worker, by_turn=by_turn)
        return claim

    async def claim_all(
        self, job_ids: Sequence[str], *, lease: float, max_attempts: int, worker: str, by_turn: bool = False
    ) -> list[Claim | None]:
        """Claim as ``claim`` does for each of the ids, in one script."""
        lease_ms = round(lease * 1000)
        answers = await self.script("claim", lease_ms, max_attempts, worker, int(by_turn), *job_ids)
        return [_read_claim(claim, lease) if outcome == "claimed" else None for outcome, *claim in answers]

    async def heartbeat(self, claims: Sequence[Claim]) -> list[LeaseState]:
        """Renew the leases; return their states in order."""
        states: list[LeaseState] = await self.script("heartbeat", *list_beats(claims))
        return states

    async def commit(self, claim: Claim, entries: Sequence[Entry]) -> LeaseState:
        """Append to the journal and to the usage, and renew the lease. Idempotent; ``lost`` if nothing was written."""
        parts: list[str] = []
        for entry in entries:
            spend = {name: value for name, value in entry.spend.model_dump().items() if value}
            parts += [entry.key, entry.type, to_json(entry.data), repr(entry.elapsed), to_json(spend)]
        state: LeaseState = await self.script("commit", claim.job_id, claim.token, claim.lease_ms, *parts)
        return state

    async def finish(
        self, claim: Claim, status: str, *, result: JobResult | None = None, error: JobError | None = None
    ) -> bool:
        """End the job. Return False if the claim was lost or the job has already ended."""
        result_json = "null" if result is None else result.model_dump_json()
        error_json = "null" if error is None else error.model_dump_json()
        return bool(await self.script("finish", claim.job_id, claim.token, status, result_json, error_json) == "ok")

    async def release(
        self, claim: Claim, *, reason: str, detail: str, delay: float = 0.0, patience: float | None = None
    ) -> Release:
        """Hand the job back to the queue without using up an attempt. ``delay``: seconds until it is due again.

        ``patience``: the seconds for which a job may wait for its engine; one that has is not handed back.
        """
        limit = 0 if patience is None else max(1, round(patience * 1000))
        outcome, *wait = await self.script(
            "release", claim.job_id, claim.token, round(delay * 1000), reason, detail, limit
        )
        releases, waited = (int(wait[0]), int(wait[1]) / 1000) if wait else (0, 0.0)
        return Release(outcome, releases, waited)


def _read_claim(answer: Sequence[Any], lease: float) -> Claim:
    job_id, token, attempt, owner, spec, origin, has_journal, granted, share_state = answer
    return Claim(
        job_id,
        token,
        attempt=attempt,
        owner=owner,
        spec=json.loads(spec),
        lease=lease,
        origin=Origin.from_json(origin or "{}"),
        has_journal=has_journal == 1,
        share=None if granted is None else StoredGrants(int(granted), share_state == "closed"),
    )
