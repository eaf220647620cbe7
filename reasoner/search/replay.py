"""The search's side of the journal: what is written, and what a replay hands back.

Answers are written in batches: what had arrived when the strategy next looked. A replay hands back the same batches in
the same order, so a strategy that reacts to arrivals decides again as it did.
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

LOST = "lost"
"""The type of entries that only add to the bill: a replay books them where they stand and hands them to nobody."""
EARLY = "early"
"""Marks entries that came when an attempt ended, while the strategy may have waited for something else."""


class ReplayMismatch(Exception):
    """The journal holds something else than the strategy asks for: other code, or another model, wrote it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Something to write: a journal entry before it has its time, with the promise that it settles."""

    key: str
    type: str
    data: dict[str, Any]
    spend: Usage
    promise: Amount = NO_AMOUNT


class Record:
    """Writes a job's journal, settles the ledger on the way, and replays what earlier attempts wrote."""

    def __init__(self, journal: Journal, ledger: Ledger, replay: Sequence[Entry]) -> None:
        self._journal = journal
        self._ledger = ledger
        self._replay = deque(replay)
        self._early: dict[str, Entry] = {}
        self.unheard: list[Entry] = []
        """What was written when the job was found cancelled: the journal holds it, and no strategy saw it."""
        self._batch = 0
        self._pass_over()

    @property
    def replaying(self) -> bool:
        return bool(self._replay)

    def replay(self, wanted: Container[str]) -> list[Entry]:
        """The next batch of the journal if it answers what is wanted now, else nothing.

        Nothing means that the first time, too, the strategy went on to something else at this point.
        """
        entries: list[Entry] = []
        while self._replay and self._replay[0].key in wanted:
            if entries and self._replay[0].data["batch"] != entries[0].data["batch"]:
                break
            entry = self._replay.popleft()
            self._ledger.replay(entry.spend, entry.elapsed)
            entries.append(entry)
            self._batch = entry.data["batch"] + 1
            self._pass_over()
        return entries

    def early(self, wanted: Container[str]) -> list[Entry]:
        """What is wanted now and came when an earlier attempt ended: the strategy had not asked for it then."""
        entries = [entry for key, entry in self._early.items() if key in wanted]
        for entry in entries:
            del self._early[entry.key]
        return entries

    async def write(self, answers: Sequence[Answer]) -> list[Entry]:
        """Settles and appends one batch. On return the journal holds it, and the strategy may see it."""
        entries = []
        for answer in answers:
            spend = self._ledger.commit(answer.promise, answer.spend)
            data = answer.data | {"batch": self._batch}
            entries.append(Entry(answer.key, answer.type, data, spend, self._ledger.elapsed_seconds()))
        self._batch += 1
        if entries:
            try:
                await self._journal.append(entries)
            except JobCancelled:
                self.unheard = entries
                raise
        return entries

    async def note(self, key: str, type: str, data: dict[str, Any], spend: Usage) -> None:
        """Writes a decision of the strategy itself; in a replay, checks that it decided the same."""
        if not self._replay:
            await self.write([Answer(key, type, data, spend)])
        elif not self.replay((key,)):
            raise ReplayMismatch(f"the journal goes on with {self._replay[0].key!r}, the strategy with {key!r}")

    def _pass_over(self) -> None:
        """Books entries that nobody asked for where they stand: lost ones, and early ones, which are kept."""
        while self._replay and (self._replay[0].type == LOST or self._replay[0].data.get(EARLY)):
            entry = self._replay.popleft()
            self._ledger.replay(entry.spend, entry.elapsed, Amount(*entry.data.get("withheld", ())))
            if entry.type != LOST:
                self._early[entry.key] = entry
