"""A journal in a file: what a search was answered, so that it continues where a kill has ended it.

Each line holds the entries of one append, so that a line that a kill has cut off loses all of them or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from reasoner.budget.grant_source import GrantSource
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry

_ENTRIES = TypeAdapter(list[Entry])


class DamagedJournal(ValueError):
    """A line before the last one cannot be read; the message names file and line."""


class FileJournal:
    """The journal of one problem's search."""

    def __init__(self, path: Path, job_id: str, grant_source: GrantSource | None = None) -> None:
        """Read the entries that there are, and cut off an incomplete last line. Raises ``DamagedJournal``."""
        self.job_id = job_id
        self.grant_source = grant_source
        self.entries: list[Entry] = []
        self.usage = Usage()
        """The bill so far."""
        self.granted = 0
        """Tokens that the search was granted so far."""
        self._path = path
        self._read()

    async def load(self) -> list[Entry]:
        return list(self.entries)

    async def append(self, entries: Sequence[Entry]) -> None:
        """Add a line with the entries; it is written when this returns."""
        with self._path.open("ab") as file:
            file.write(_ENTRIES.dump_json(list(entries)) + b"\n")
        self._keep(entries)

    def _keep(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        for entry in entries:
            self.usage += entry.spend
            self.granted += int(entry.data["tokens"]) if entry.type == "grant" else 0

    def _read(self) -> None:
        content = self._path.read_bytes() if self._path.exists() else b""
        complete = content.rpartition(b"\n")[0]
        for number, line in enumerate(complete.split(b"\n") if complete else [], 1):
            try:
                self._keep(_ENTRIES.validate_json(line))
            except ValidationError:
                raise DamagedJournal(f"{self._path}, line {number}: no entries of a journal") from None
        kept = len(complete) + 1 if complete else 0
        if kept < len(content):
            with self._path.open("r+b") as file:
                file.truncate(kept)


def name_journal(problem: str) -> str:
    """Return the name of a problem's journal, whatever its id has in it."""
    return f"{blake2b(problem.encode(), digest_size=10).hexdigest()}.jsonl"
