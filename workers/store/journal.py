"""The journal of a claimed job in Redis, as ``reasoner`` accesses it."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.budget.grant_source import GrantSource
from reasoner.jobs.journal import Entry, JobCancelled, LeaseLost
from workers.store.claims import Claim
from workers.store.jobs import JobStore


class RedisJournal:
    """Implements ``reasoner.jobs.journal.Journal`` for the holder of one claim."""

    def __init__(self, store: JobStore, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self.job_id = claim.job_id
        self.grant_source: GrantSource | None = claim.share
        self._is_empty = not claim.has_journal

    async def load(self) -> list[Entry]:
        return [] if self._is_empty else await self._store.load_entries(self._claim.job_id)

    async def append(self, entries: Sequence[Entry]) -> None:
        self._is_empty = False
        beat = await self._store.commit(self._claim, entries)
        if beat == "lost":
            raise LeaseLost(self._claim.job_id)
        if beat == "cancel":
            raise JobCancelled(self._claim.job_id)
