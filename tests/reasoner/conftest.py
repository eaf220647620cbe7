"""Fixtures of the tests of ``reasoner``; the workers for comparisons and patterns are shared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reasoner.jobs.events import read_data
from reasoner.jobs.journal import Entry, MemoryJournal
from tests.worker_pools import no_workers, warm_workers

__all__ = ["no_workers", "warm_workers"]


@pytest.fixture(autouse=True)
def _shared(warm_workers: None) -> None:
    """Keep the worker pools running for the whole session."""


@pytest.fixture(autouse=True)
def _events_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every entry of a journal has a documented type, and only the fields of it."""
    append = MemoryJournal.append

    async def check(journal: MemoryJournal, entries: Sequence[Entry]) -> None:
        for entry in entries:
            read_data(entry.type, entry.data)
        await append(journal, entries)

    monkeypatch.setattr(MemoryJournal, "append", check)
