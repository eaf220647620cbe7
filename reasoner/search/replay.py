"""The replay log: records the results that a search receives in the journal, and replays them when the job restarts.

Entries are written in batches: everything that had arrived when the strategy next looked. A replay returns the same
batches in the same order, so a strategy that reacts to arrivals makes the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, JobCancelled, Journal

BILLED_ONLY = "lost"
"""Type of entries that only add to the bill: a replay counts their cost and does not return them."""
ARRIVED_AT_SHUTDOWN = "early"
"""Key in the data of entries that were written when an attempt ended, before the strategy asked for them."""


class ReplayMismatch(Exception):
    """The strategy requests something that differs from the journal, which other code or another model wrote."""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A journal entry before it is written, with the budget that was reserved for it."""

    key: str
    type: str
    data: dict[str, Any]
    spend: Usage
    reserved: Amount = NO_AMOUNT


class ReplayLog:
    """Writes a job's journal, commits the spend to the ledger, and replays what earlier attempts wrote."""

    def __init__(self, journal: Journal, ledger: Ledger, replay: Sequence[Entry]) -> None:
        self._journal = journal
        self._ledger = ledger
        self._replay = deque(replay)
        self._arrived_at_shutdown: dict[str, Entry] = {}
        self.unseen_after_cancel: list[Entry] = []
        """Entries that were written when the job was found cancelled, before the strategy saw them."""
        self.usage_by_model: dict[str, Usage] = {}
        """The bill by model, without the time, of entries that name one (``bill_model``)."""
        self._batch = 0
        self._skip_unrequested()

    @property
    def is_replaying(self) -> bool:
        return bool(self._replay)

    def replay(self, requested: Container[str]) -> list[Entry]:
        """Return the next batch of the journal if it has the requested keys, else nothing.

        An empty result means that the earlier attempt, too, continued with something else at this point.
        """
        entries: list[Entry] = []
        while self._replay and self._replay[0].key in requested:
            if entries and self._replay[0].data["batch"] != entries[0].data["batch"]:
                break
            entry = self._replay.popleft()
            self._ledger.replay(entry.spend, entry.elapsed)
            bill_model(self.usage_by_model, entry)
            entries.append(entry)
            self._batch = entry.data["batch"] + 1
            self._skip_unrequested()
        return entries

    def take_arrived_at_shutdown(self, requested: Container[str]) -> list[Entry]:
        """Remove and return requested entries that arrived when an earlier attempt ended."""
        entries = [entry for key, entry in self._arrived_at_shutdown.items() if key in requested]
        for entry in entries:
            del self._arrived_at_shutdown[entry.key]
        return entries

    async def write(self, pending: Sequence[PendingEntry]) -> list[Entry]:
        """Commit and append one batch. On return the journal holds it, and the strategy may see it."""
        entries = []
        for item in pending:
            spend = self._ledger.commit(item.reserved, item.spend)
            data = item.data | {"batch": self._batch}
            entries.append(Entry(item.key, item.type, data=data, spend=spend, elapsed=self._ledger.elapsed_seconds()))
            bill_model(self.usage_by_model, entries[-1])
        self._batch += 1
        if entries:
            try:
                await self._journal.append(entries)
            except JobCancelled:
                self.unseen_after_cancel = entries
                raise
        return entries

    async def record(self, key: str, type: str, data: dict[str, Any], spend: Usage) -> None:
        """Write a decision of the strategy. In a replay, raise ``ReplayMismatch`` if it decided something else."""
        if not self._replay:
            await self.write([PendingEntry(key, type, data, spend)])
        elif not self.replay((key,)):
            raise ReplayMismatch(f"the journal goes on with {self._replay[0].key!r}, the strategy with {key!r}")

    def _skip_unrequested(self) -> None:
        """Add entries to the bill that no request was waiting for, and keep those that arrived at a shutdown."""
        while self._replay:
            entry = self._replay[0]
            is_billed_only = entry.type == BILLED_ONLY
            if not is_billed_only and not entry.data.get(ARRIVED_AT_SHUTDOWN):
                return
            self._replay.popleft()
            self._ledger.replay(entry.spend, entry.elapsed, Amount(*entry.data.get("withheld", ())))
            bill_model(self.usage_by_model, entry)
            if not is_billed_only:
                self._arrived_at_shutdown[entry.key] = entry


def bill_model(usages: dict[str, Usage], entry: Entry) -> None:
    """Add an entry's spend to that of the model which it names; the time, in which all models work, is left out."""
    model: str | None = entry.data.get("model")
    if model is not None:
        usages[model] = usages.get(model, Usage()) + entry.spend.model_copy(update={"seconds": 0.0})
