"""The journal: every answer that a search got, in order, before the search saw it.

A strategy is a deterministic function of these answers. Running it again on its journal brings it back to where it was,
so no strategy holds checkpoint code, and the same entries are the client's event stream and the audit of the bill.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reasoner.budget.grant_source import GrantSource
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobResult


class JobCancelled(Exception):
    """The client cancelled the job."""

    result: JobResult | None = None
    """The best that there was, once ``run_job`` has let go of the search; ``None`` if it had not begun."""


class LeaseLost(Exception):
    """Another worker owns the job now; this one must stop and write nothing more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``key`` names the answer deterministically (operation, node path, part). ``spend`` is what it added to the bill.

    Keys are unique within a job. ``elapsed`` is the job's working time in seconds when the entry was made: a replay
    sets its clock by it, so decisions that looked at the clock fall the same way.
    """

    key: str
    type: str
    data: dict[str, Any]
    spend: Usage
    elapsed: float


class Journal(Protocol):
    job_id: str
    """The job that it belongs to."""
    grant_source: GrantSource | None
    """Where the job gets tokens from, if it shares a budget."""

    async def load(self) -> list[Entry]:
        """All entries of earlier attempts, oldest first."""
        ...

    async def append(self, entries: Sequence[Entry]) -> None:
        """Writes entries and their spend atomically and in order.

        Raises ``JobCancelled`` (after writing: what was spent is recorded) when the client cancelled, ``LeaseLost``
        (nothing written) when the job has another owner.
        """
        ...


class MemoryJournal:
    """A journal for a search that runs inside one process: evaluation and tests."""

    def __init__(self, entries: Sequence[Entry] = (), grant_source: GrantSource | None = None) -> None:
        self.job_id = uuid.uuid4().hex
        self.grant_source = grant_source
        self.entries = list(entries)

    async def load(self) -> list[Entry]:
        return list(self.entries)

    async def append(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(entries)
