"""Where a job of a batch gets its tokens from: grants out of a budget that it shares with others.

The journal holds every grant. A replay hands them back where they came the first time, so the search decides again as
it did, and asks anew only when it has used up all that it was ever granted.
"""

from __future__ import annotations

from collections.abc import Callable

from reasoner.budget.allocator import TokenRequest
from reasoner.budget.grant_source import GrantSource
from reasoner.budget.ledger import Ledger
from reasoner.budget.usage import Usage
from reasoner.search.replay import Record

ENOUGH = 4
"""Slices: a job that holds so many and still cannot go on is not held up by its grant."""


class Grants:
    """A search's side: raises its ledger's limit by what it is granted, and writes the journal."""

    def __init__(
        self, grant_source: GrantSource, ledger: Ledger, record: Record, ask: Callable[[], TokenRequest]
    ) -> None:
        """``ask`` says what the search would ask for now."""
        self._grant_source = grant_source
        self._ledger = ledger
        self._record = record
        self._ask = ask
        self._count = 0
        self._granted = 0
        self._closed = False

    async def more(self) -> bool:
        """For a search that the ledger holds up: whether it may be worth trying again. Raises ``Parked``."""
        key = f"grant:{self._count}"
        if self._record.replaying:
            entries = self._record.replay((key,))
            if not entries:
                return False
            tokens: int = entries[0].data["tokens"]
        else:
            ask = self._ask()
            if self._closed or not self._ledger.needs_grant(ENOUGH * ask.tokens):
                return False
            tokens = await self._grant_source.request_tokens(self._granted, ask)
            await self._record.note(key, "grant", {"tokens": tokens}, Usage())
        self._count += 1
        self._granted += tokens
        self._closed = tokens == 0
        self._ledger.add_grant(tokens)
        return True
