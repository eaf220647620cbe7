"""Operations of API processes on all jobs: find those that need a wake-up, expire old ones, and count."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from reasoner.base_model import StrictModel
from reasoner.jobs.job import TERMINAL_STATUSES
from workers.archive.filters import DEAD
from workers.archive.record import JobRecord
from workers.config.rate_limits import Share
from workers.store.broker_errors import BrokerRefused, read_eviction_policy
from workers.store.redis_client import RedisClient
from workers.store.serialization import to_json

RESEND_SECONDS = 5.0
"""The interval after which the wake-up of a lost job or webhook that nobody has claimed is sent again."""
JOB_PLACEHOLDER: Final = "JOB-ID"
"""Stands for a job's id in a ``WakeupTemplates``."""
TAG_PLACEHOLDER: Final = "DELIVERY-TAG"
"""Stands for what tells one message from another."""
_MAX_REAPED = 1000
_MAX_EXPIRED = 100


class DailyUsage(StrictModel):
    """The spend of one owner's jobs that ended on one day (UTC), with what they spent on earlier days."""

    day: str
    owner: str
    jobs: int
    tokens: int
    """Generated tokens plus tokens that verifiers computed, as budgets count them."""
    cost: float


@dataclass(frozen=True, slots=True)
class WakeupTemplates:
    """The messages (JSON) that wake a job and its webhook, with placeholders."""

    run: str
    webhook: str


class Reaping(RedisClient):
    """The operations of the reaper, of the engine watch and of the metrics."""

    async def reap(
        self,
        max_attempts: int,
        templates: WakeupTemplates | None = None,
        shares: Mapping[str, Share] | None = None,
    ) -> list[tuple[str, str]]:
        """Send the wake-ups that are missing now. Return their jobs, each with its queue.

        ``templates``: of the messages, which the store keeps for those of new jobs. ``shares``: of owners, that of all
        others with the empty name; kept likewise.
        """
        messages = ("", "") if templates is None else (templates.run, templates.webhook)
        owners = "" if shares is None else to_json({owner: _write_share(share) for owner, share in shares.items()})
        resend = round(RESEND_SECONDS * 1000)
        rows = await self.script("reap", _MAX_REAPED, resend, max_attempts, *messages, owners)
        return [(job_id, queue) for job_id, queue in rows]

    async def has_jobs_waiting_for_engine(self) -> bool:
        """Return True if there may be jobs that were handed back because no engine answered."""
        return bool(await self.command("EXISTS", "reasoner:waiting"))

    async def wake_jobs_waiting_for_engine(self) -> int:
        """Make those jobs due now. Return their number."""
        return int(await self.script("wake"))

    async def expire(self, retention: float) -> int:
        """Delete some of the jobs that ended more than ``retention`` seconds ago. Return their number."""
        return int(await self.script("expire", round(retention * 1000), _MAX_EXPIRED))

    async def claim_span_export(self, holder: str, seconds: float, exported: int | None = None) -> int | None:
        """Hold the right to export spans, or extend it. Return the time (ms) up to which ended jobs are exported.

        ``exported``: that time, if it has moved. ``None`` while another process holds the right.
        """
        moved = "" if exported is None else exported
        upto = await self.script("export_spans", holder, round(seconds * 1000), moved)
        return None if upto is None else int(upto)

    async def claim_for_archive(
        self, holder: str, seconds: float, age: float, limit: int
    ) -> tuple[str, list[str]] | None:
        """Hold the right to move jobs to the archive, and mark some that ended ``age`` seconds ago or earlier.

        Return the number of this pass and the jobs; ``None`` while another process holds the right.
        """
        claimed = await self.script("archive_claim", holder, round(seconds * 1000), round(age * 1000), limit)
        return None if claimed is None else (claimed[0], claimed[1:])

    async def settle_archived(self, number: str, records: Sequence[JobRecord], stale: Sequence[str]) -> int:
        """Remove the jobs that a pass has stored in the archive and that have not changed since; return their number.

        ``stale``: jobs that the pass found gone or active, and removed from the archive.
        """
        read = [part for record in records for part in (record.id, record.fields["seq"], record.fields["finished"])]
        unread = [part for job_id in stale for part in (job_id, "", "")]
        return int(await self.script("archive_settle", number, *read, *unread))

    async def get_stats(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return the number of jobs by status (dead ones too), and the counters over all jobs so far."""
        statuses = ("queued", "in_progress", *sorted(TERMINAL_STATUSES), DEAD)
        counts = [await self.command("ZCARD", f"reasoner:jobs:{status}") for status in statuses]
        counters = await self.command("HGETALL", "reasoner:stats")
        return dict(zip(statuses, counts, strict=True)), {name: float(value) for name, value in counters.items()}

    async def get_usage(self, num_days: int, owner: str | None = None) -> list[DailyUsage]:
        """Return the spend of the jobs that ended on each of the last days, today first, by owner.

        ``owner``: the only one; ``None`` for all.
        """
        today, rows = int(time.time() // 86_400), []
        for day in range(today, today - num_days, -1):
            counted: dict[str, dict[str, float]] = {}
            for name, value in (await self.command("HGETALL", f"reasoner:usage:{day}")).items():
                spender, field = name.split(" ")
                counted.setdefault(spender, {})[field] = float(value)
            date = datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()
            rows += [
                DailyUsage(
                    day=date, owner=spender, jobs=int(spent["jobs"]), tokens=int(spent["tokens"]), cost=spent["cost"]
                )
                for spender, spent in sorted(counted.items())
                if owner in (None, spender)
            ]
        return rows

    async def get_eviction_policy(self) -> str | None:
        """Return the broker's ``maxmemory-policy``; ``None`` if its user may not ask."""
        try:
            return read_eviction_policy(await self.command("INFO", "memory"))
        except BrokerRefused:
            return None

    async def get_queues(self) -> dict[str, dict[str, int]]:
        """Return the number of jobs of each queue that could start now (``ready``), and of those that run."""
        rows = await self.script("queues")
        return {queue: {"ready": ready, "running": running} for queue, ready, running in rows}

    async def get_memory(self) -> tuple[int, int] | None:
        """Return the broker's memory in use and its limit in bytes, 0 for none; ``None`` if its user may not ask."""
        try:
            memory = await self.command("INFO", "memory")
        except BrokerRefused:
            return None
        return int(memory["used_memory"]), int(memory["maxmemory"])

    async def increment_counters(self, counters: Mapping[str, int]) -> None:
        """Add to the counters of ``get_stats``."""
        for name, count in counters.items():
            await self.command("HINCRBY", "reasoner:stats", name, count)


def _write_share(share: Share) -> dict[str, float]:
    return {name: value for name, value in asdict(share).items() if value is not None}
