"""The journal of a job: every result that its search received, in order, written before the search sees it.

A strategy is a deterministic function of these results. Running it again on its journal restores its state, so that no
strategy needs checkpoint code. The same entries are the client's event stream and the itemised bill.
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
    """Best result so far, set by ``run_job`` after it has closed the search; ``None`` if the search had not begun."""


class LeaseLost(Exception):
    """Another worker owns the job now: stop, and write nothing more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One result of a job.

    ``key`` identifies the result deterministically (operation, node path, part) and is unique within a job. ``spend``
    is its share of the bill. ``elapsed`` is the job's working time in seconds when the entry was made: a replay sets
    its clock to it, so that decisions that depend on the clock are repeated.
    """

    key: str
    type: str
    data: dict[str, Any]
    spend: Usage
    elapsed: float


class Journal(Protocol):
    job_id: str
    """Id of the job."""
    grant_source: GrantSource | None
    """Source of token grants if the job shares a budget, else ``None``."""

    async def load(self) -> list[Entry]:
        """Return all entries of earlier attempts, oldest first."""
        ...

    async def append(self, entries: Sequence[Entry]) -> None:
        """Write entries and their spend atomically and in order.

        Raises ``JobCancelled`` if the client has cancelled the job (the entries are written, so that the spend is
        recorded) and ``LeaseLost`` if another worker owns it (nothing is written).
        """
        ...


class MemoryJournal:
    """Journal in memory, for searches that live in one process: evaluation, in-process CLI, tests."""

    def __init__(self, entries: Sequence[Entry] = (), grant_source: GrantSource | None = None) -> None:
        self.job_id = uuid.uuid4().hex
        self.grant_source = grant_source
        self.entries = list(entries)

    async def load(self) -> list[Entry]:
        return list(self.entries)

    async def append(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(entries)
