"""Token grants of a job that shares a budget with others.

The journal holds every grant. A replay returns them at the same points, so the search makes the same decisions, and
requests tokens only after all recorded grants are used up.
"""

from __future__ import annotations

from collections.abc import Callable

from reasoner.budget.allocator import TokenRequest
from reasoner.budget.grant_source import GrantSource
from reasoner.budget.ledger import Ledger
from reasoner.budget.usage import Usage
from reasoner.search.replay import ReplayLog

MAX_IDLE_GRANTS = 4
"""Limit of unused granted tokens, in typical requests, above which a job is not blocked for lack of a grant."""


class Grants:
    """Raises a ledger's limit by the tokens that the job is granted."""

    def __init__(
        self, grant_source: GrantSource, ledger: Ledger, replay_log: ReplayLog, next_request: Callable[[], TokenRequest]
    ) -> None:
        self._grant_source = grant_source
        self._ledger = ledger
        self._replay_log = replay_log
        self._next_request = next_request
        self._count = 0
        self._granted = 0
        self._is_exhausted = False

    async def request_more(self) -> bool:
        """Request tokens for a search that is blocked by its ledger; return True if a retry may be worthwhile.

        Raises ``WaitingForBudget`` if the job must not wait for the grant.
        """
        key = f"grant:{self._count}"
        if self._replay_log.is_replaying:
            entries = self._replay_log.replay((key,))
            if not entries:
                return False
            tokens: int = entries[0].data["tokens"]
        else:
            request = self._next_request()
            if self._is_exhausted or not self._ledger.needs_grant(MAX_IDLE_GRANTS * request.tokens):
                return False
            tokens = await self._grant_source.request_tokens(self._granted, request)
            await self._replay_log.record(key, "grant", {"tokens": tokens}, Usage())
        self._count += 1
        self._granted += tokens
        self._is_exhausted = tokens == 0
        self._ledger.add_grant(tokens)
        return True
