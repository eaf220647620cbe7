"""Sources of token grants, for jobs that share a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reasoner.budget.allocator import TokenRequest


class WaitingForBudget(Exception):
    """The job has to wait for a grant; once it has one, it can be run again from its journal."""

    def __init__(self, request: TokenRequest) -> None:
        super().__init__(f"waits for {request.tokens} tokens")
        self.request = request


class GrantSource(Protocol):
    """One job's access to a shared budget."""

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        """Return tokens beyond the ``granted`` ones that the job has used; 0 if there will be no more.

        Raises ``WaitingForBudget`` if the job must not wait for the decision.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredGrants:
    """Grants that a store has decided so far; the job is parked if it needs more."""

    granted: int
    """Tokens over the job's whole life."""
    closed: bool
    """True if there will be no further grants."""

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        if granted >= self.granted and not self.closed:
            raise WaitingForBudget(request)
        return self.granted - granted
