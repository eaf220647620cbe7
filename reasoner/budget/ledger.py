"""The ledger of one job: what was spent, what is promised to requests in flight, and what is left.

The rule that keeps a budget to the token, the FLOP and the cent: a request never asks for more than is left after all
promises, and a promise is settled with what the request really took. A promise is the most that a request can take. For
a branch that is its whole prompt, computed, and all the tokens that it may write: what the cache turns out to hold
comes back when the branch arrives. Under a limit on FLOPs nobody guesses tokens for the job, since how many guesses go
wrong cannot be promised.

A search that grows step by step keeps a part of every limit until it has an answer: what one branch takes to its end,
at most half. So a budget that is small for its width still ends with an answer. How much that is nobody knows before a
branch has ended: it is guessed from the steps so far, since what is kept needlessly is missing where the search looks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from engine.protocol.types import ModelInfo
from reasoner.budget.prices import MONEY_UNITS, NO_AMOUNT, Amount, Prices, TokenRate
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage

_NAMES = ("tokens", "FLOPs", "trillionths")
GRACE = 0.25
"""Seconds behind the end of the time budget, in all, for bringing the job to its end: the last answers are compared,
and what was begun before may still arrive."""


class Ledger:
    """Holds all limits of a budget at once.

    Tokens are ``Usage.total``: generated plus computed by the verifier. Seconds are work over all attempts.
    """

    def __init__(
        self,
        budget: Budget,
        prices: Mapping[str, Prices] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        by_grants: bool = False,
    ) -> None:
        """``by_grants``: beside its own limits the job has the tokens that ``grant`` brings, at first none."""
        self.budget = budget
        self.usage = Usage()
        self._prices = prices or {}
        self._granted = 0 if by_grants else None
        self._limits: tuple[int | None, ...] = (
            0 if by_grants else budget.tokens,
            None if budget.flops is None else int(budget.flops),
            None if budget.cost is None else round(budget.cost * MONEY_UNITS),
        )
        self._clock = clock
        self._spent = NO_AMOUNT
        self._promised = NO_AMOUNT
        self._kept: tuple[Amount, Amount] | None = None
        self._base = 0.0
        self._since = clock()

    def rate_of_model(self, model: ModelInfo) -> TokenRate:
        """What a token of this model takes in this job."""
        return TokenRate.of_model(model, self._prices)

    @property
    def has_limits(self) -> bool:
        """Whether a request must say how much it may take."""
        return any(limit is not None for limit in self._limits)

    @property
    def is_setting_aside(self) -> bool:
        """True while a part is kept for the end of one branch."""
        return self._kept is not None and (self.has_limits or self.budget.seconds is not None)

    def set_aside(self, most: Amount, likely: Amount) -> None:
        """Keep what one branch takes from all but who asks for the ``whole`` budget.

        That is what it is ``likely`` to take, from a quarter to a half of each limit, and no more than ``most``. Of
        time half is kept: nobody can tell how long a branch takes.
        """
        self._kept = (most, likely)

    def release_set_aside(self) -> None:
        """Keep nothing any more."""
        self._kept = None

    def max_affordable(self, one: Amount, fixed: Amount = NO_AMOUNT, *, whole: bool = False) -> int:
        """How many times ``one`` can be promised beside ``fixed``: not at all when not above 0, a very large number
        when nothing limits it. ``whole`` is for what may take what is kept, too."""
        if self._kept is not None and not whole:
            if self.budget.seconds is not None and self.elapsed_seconds() > self.budget.seconds / 2:
                return 0
            kept = (
                most if limit is None else min(most, max(likely, limit // 4), limit // 2)
                for most, likely, limit in zip(*self._kept, self._limits, strict=True)
            )
            fixed += Amount(*kept)
        left = self._left(self._spent + self._promised + fixed)
        return min(
            have if have == sys.maxsize else have // each if each else (sys.maxsize if have >= 0 else -1)
            for have, each in zip(left, one, strict=True)
        )

    def reserve(self, promise: Amount) -> None:
        """Promises an amount to a request. Asking for more than is left is a bug of the caller."""
        if min(self._left(self._spent + self._promised + promise)) < 0 or min(promise) < 0:
            raise ValueError(f"cannot promise {promise}: {self._spent} and {self._promised} of {self._limits} are gone")
        self._promised += promise

    def add_grant(self, tokens: int) -> None:
        """Raises the limit of a job that lives by grants, up to its own limit."""
        if self._granted is None:
            raise ValueError("this job has a budget of its own")
        self._granted += tokens
        cap = self._granted if self.budget.tokens is None else min(self._granted, self.budget.tokens)
        self._limits = (cap, *self._limits[1:])

    def needs_grant(self, enough: int) -> bool:
        """Whether it is for want of a grant that the job cannot go on: it has less than ``enough`` tokens left of what
        it was granted, and its own limits leave it something."""
        if self._granted is None or (self.budget.tokens is not None and self.budget.tokens <= self._granted):
            return False
        tokens, *others = self._left(self._spent + self._promised)
        return tokens < enough and min(others) > 0 and self.seconds_left() != 0.0

    def release(self, promise: Amount) -> None:
        """Takes a promise back of which nothing was used."""
        self._promised -= promise

    def commit(self, promise: Amount, spend: Usage) -> Usage:
        """Turns a promise into what was really spent, at most the promise; the rest is available again.

        Answers the spend with the working time since the last settlement added.
        """
        taken = Amount.from_usage(spend)
        over = [
            name
            for name, limit, most, took in zip(_NAMES, self._limits, promise, taken, strict=True)
            if limit is not None and took > most
        ]
        if over:
            raise ValueError(f"a request that was promised {promise} took {taken}: too many {', '.join(over)}")
        self._promised -= promise
        spend = spend.model_copy(update={"seconds": self.elapsed_seconds() - self.usage.seconds})
        self._book(spend)
        return spend

    def replay(self, spend: Usage, elapsed: float, withheld: Amount = NO_AMOUNT) -> None:
        """Books what an earlier attempt spent, and what it promised for good, and sets the clock to then."""
        self._book(spend)
        self._promised += withheld
        self._base = elapsed
        self._since = self._clock()

    def elapsed_seconds(self) -> float:
        """Seconds of work so far, earlier attempts included."""
        return self._base + self._clock() - self._since

    def seconds_left(self) -> float | None:
        """Seconds until the time budget ends, at least zero; ``None`` when time is not limited."""
        if self.budget.seconds is None:
            return None
        return max(0.0, self.budget.seconds - self.elapsed_seconds())

    def seconds_until_cut(self) -> float | None:
        """Return the seconds until what still runs is cut, which is ``GRACE`` later; ``None`` as above."""
        if self.budget.seconds is None:
            return None
        return max(0.0, self.budget.seconds + GRACE - self.elapsed_seconds())

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more may be asked for."""
        return min(self._left(self._spent + self._promised)) <= 0 or self.seconds_left() == 0.0

    def _left(self, gone: Amount) -> list[int]:
        """What the limits leave, a very large number where there is none."""
        return [sys.maxsize if limit is None else limit - used for limit, used in zip(self._limits, gone, strict=True)]

    def _book(self, spend: Usage) -> None:
        self._spent += Amount.from_usage(spend)
        # The sums of whole numbers, not of their roundings.
        exact = {"flops": float(self._spent.flops), "cost": self._spent.money / MONEY_UNITS}
        self.usage = (self.usage + spend).model_copy(update=exact)
