"""The ledger of one job: what was spent, what is promised to requests in flight, and what is left.

The rule that keeps a budget to the token: a request never asks for more than is left after all promises, and a promise
is settled with what the request really took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from reasoner.jobs import Budget, Usage


class Ledger:
    """Tokens are ``Usage.total``: generated plus computed by the verifier. Seconds are work over all attempts."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.usage = Usage()
        self._clock = clock
        self._reserved = 0
        self._base = 0.0
        self._since = clock()

    def available(self) -> int:
        """Tokens that are neither spent nor promised; a very large number when tokens are not limited."""
        if self.budget.tokens is None:
            return sys.maxsize
        return self.budget.tokens - self.usage.total - self._reserved

    def reserve(self, tokens: int) -> None:
        """Promises tokens to a request. Asking for more than is available is a bug of the caller."""
        if not 0 <= tokens <= self.available():
            raise ValueError(f"cannot promise {tokens} tokens: {self.available()} are available")
        self._reserved += tokens

    def release(self, promise: int) -> None:
        """Takes a promise back of which nothing was used."""
        self._reserved -= promise

    def settle(self, promise: int, spend: Usage) -> Usage:
        """Turns a promise into what was really spent, at most the promise; the rest is available again.

        Answers the spend with the working time since the last settlement added.
        """
        if self.budget.tokens is not None and spend.total > promise:
            raise ValueError(f"a request that was promised {promise} tokens took {spend.total}")
        self._reserved -= promise
        spend = spend.model_copy(update={"seconds": self.elapsed() - self.usage.seconds})
        self.usage += spend
        return spend

    def replay(self, spend: Usage, elapsed: float, withheld: int = 0) -> None:
        """Books what an earlier attempt spent, and tokens that it promised for good, and sets the clock to then."""
        self.usage += spend
        self._reserved += withheld
        self._base = elapsed
        self._since = self._clock()

    def elapsed(self) -> float:
        """Seconds of work so far, earlier attempts included."""
        return self._base + self._clock() - self._since

    def seconds_left(self) -> float | None:
        """Seconds until the time budget ends, at least zero; ``None`` when time is not limited."""
        if self.budget.seconds is None:
            return None
        return max(0.0, self.budget.seconds - self.elapsed())

    @property
    def exhausted(self) -> bool:
        """Whether nothing more may be asked for."""
        return self.available() <= 0 or self.seconds_left() == 0.0
