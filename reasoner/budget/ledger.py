"""The ledger of one job: amounts that are spent, reserved for requests in flight, and left.

A budget is exact to the token, the FLOP and the cent because every request first reserves the most that it can take,
and reservations never exceed what is left. A branch reserves the computation of its whole prompt and all tokens that it
may generate; when it ends, its real usage is committed and the rest, such as prompt tokens found in the cache, is
released. Under a limit on FLOPs speculation is disabled, since the number of rejected draft tokens has no useful bound.

A search that expands step by step sets a part of every limit aside until it has an answer: the amount that one branch
needs to reach its end, at most half. So a search ends with an answer even if its budget is small for its width. Before
any branch has ended, the need is estimated from the steps so far, since an overestimate withholds budget from the
search.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from engine.protocol.types import ModelInfo
from reasoner.budget.prices import MONEY_UNITS, NO_AMOUNT, Amount, Prices, TokenRate
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage

_LIMIT_NAMES = ("tokens", "FLOPs", "trillionths")
GRACE_SECONDS = 0.25
"""Time after the end of the time budget in which results may still arrive and the last answers are compared."""


class Ledger:
    """The limits of one budget, and the amount left of each.

    Tokens are ``Usage.total``: generated plus computed by the verifier. Seconds are working time over all attempts.
    """

    def __init__(
        self,
        budget: Budget,
        prices: Mapping[str, Prices] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        seconds_to_deadline: float | None = None,
        from_shared_pool: bool = False,
        counts_exactly: bool = True,
    ) -> None:
        """``seconds_to_deadline``: the time from now on for which the job may work, in this attempt.

        With ``from_shared_pool`` the job may spend only the tokens that ``add_grant`` adds, within its own limits.
        ``counts_exactly``: False if requests may spend more than was reserved (``ModelInfo.counts_exactly``).
        """
        self.budget = budget
        self.usage = Usage()
        self._prices = prices or {}
        self._counts_exactly = counts_exactly
        self._granted_tokens = 0 if from_shared_pool else None
        self._limits: tuple[int | None, ...] = (
            0 if from_shared_pool else budget.tokens,
            None if budget.flops is None else int(budget.flops),
            None if budget.cost is None else round(budget.cost * MONEY_UNITS),
        )
        self._clock = clock
        self._spent = NO_AMOUNT
        self._reserved = NO_AMOUNT
        self._answer_reserve: tuple[Amount, Amount] | None = None
        self._earlier_seconds = 0.0
        self._started_at = clock()
        self._ends_at = None if seconds_to_deadline is None else self._started_at + seconds_to_deadline

    def rate_of_model(self, model: ModelInfo) -> TokenRate:
        """Return the FLOPs and the price of one token of this model."""
        return TokenRate.of_model(model, self._prices)

    @property
    def has_limits(self) -> bool:
        """True if tokens, FLOPs or cost are limited, so that requests need an upper bound."""
        return any(limit is not None for limit in self._limits)

    @property
    def has_answer_reserve(self) -> bool:
        """True while a part of the limits is set aside for the end of one branch."""
        return self._answer_reserve is not None and (self.has_limits or self._max_seconds is not None)

    def reserve_for_answer(self, most: Amount, likely: Amount) -> None:
        """Set aside what one branch needs; only requests that finish an answer may use it.

        The amount is ``likely``, clipped to between a quarter and half of each limit, and at most ``most``. Half of the
        time is set aside, since the duration of a branch is unknown.
        """
        self._answer_reserve = (most, likely)

    def release_answer_reserve(self) -> None:
        """Make the amount that was set aside available to all requests."""
        self._answer_reserve = None

    def max_affordable(self, each: Amount, fixed: Amount = NO_AMOUNT, *, may_use_answer_reserve: bool = False) -> int:
        """Return how many times ``each`` can be reserved beside ``fixed``, by default without what is set aside.

        The result is 0 or negative if not even once, and ``sys.maxsize`` if nothing limits it.
        """
        if self._answer_reserve is not None and not may_use_answer_reserve:
            if self._max_seconds is not None and self.elapsed_seconds() > self._max_seconds / 2:
                return 0
            amount = (
                most if limit is None else min(most, max(likely, limit // 4), limit // 2)
                for most, likely, limit in zip(*self._answer_reserve, self._limits, strict=True)
            )
            fixed += Amount(*amount)
        left = self._compute_left(self._spent + self._reserved + fixed)
        return min(_count_fits(rest, need) for rest, need in zip(left, each, strict=True))

    def reserve(self, amount: Amount) -> None:
        """Reserve an amount for a request. Raises ``ValueError`` for more than is left, a bug of the caller."""
        if min(self._compute_left(self._spent + self._reserved + amount)) < 0 or min(amount) < 0:
            raise ValueError(
                f"cannot reserve {amount}: of {self._limits}, {self._spent} is spent and {self._reserved} is reserved"
            )
        self._reserved += amount

    def add_grant(self, tokens: int) -> None:
        """Raise the token limit of a job that spends granted tokens, up to its own limit."""
        if self._granted_tokens is None:
            raise ValueError("this job has a budget of its own and takes no grants")
        self._granted_tokens += tokens
        cap = self._granted_tokens if self.budget.tokens is None else min(self._granted_tokens, self.budget.tokens)
        self._limits = (cap, *self._limits[1:])

    def needs_grant(self, enough_tokens: int) -> bool:
        """Return True if the job cannot go on for lack of a grant.

        That is, fewer than ``enough_tokens`` of its granted tokens are left, and its own limits are not reached.
        """
        if self._granted_tokens is None or (
            self.budget.tokens is not None and self.budget.tokens <= self._granted_tokens
        ):
            return False
        tokens, *others = self._compute_left(self._spent + self._reserved)
        return tokens < enough_tokens and min(others) > 0 and self.seconds_left() != 0.0

    def release(self, reservation: Amount) -> None:
        """Release a reservation of which nothing was used."""
        self._reserved -= reservation

    def commit(self, reservation: Amount, spend: Usage) -> Usage:
        """Replace a reservation by the real spend, at most the reservation; the rest is available again.

        Returns the spend with the working time since the last commit added. Raises ``ValueError`` if it exceeds the
        reservation, a bug, unless counts are estimates: what a server has spent is then billed all the same.
        """
        used = Amount.from_usage(spend)
        exceeded = [
            name
            for name, limit, most, actual in zip(_LIMIT_NAMES, self._limits, reservation, used, strict=True)
            if limit is not None and actual > most
        ]
        if exceeded and self._counts_exactly:
            raise ValueError(f"a request with {reservation} reserved used {used}: too many {', '.join(exceeded)}")
        self._reserved -= reservation
        spend = spend.model_copy(update={"seconds": self.elapsed_seconds() - self.usage.seconds})
        self._add_spend(spend)
        return spend

    def replay(self, spend: Usage, elapsed: float, withheld: Amount = NO_AMOUNT) -> None:
        """Add what an earlier attempt spent and reserved for good, and set the clock to ``elapsed`` seconds."""
        self._add_spend(spend)
        self._reserved += withheld
        self._earlier_seconds = elapsed
        self._started_at = self._clock()

    def elapsed_seconds(self) -> float:
        """Return the working time so far, earlier attempts included."""
        return self._earlier_seconds + self._clock() - self._started_at

    @property
    def _max_seconds(self) -> float | None:
        """The limit of ``elapsed_seconds``."""
        if self._ends_at is None:
            return self.budget.seconds
        until_deadline = self._earlier_seconds + max(0.0, self._ends_at - self._started_at)
        return until_deadline if self.budget.seconds is None else min(until_deadline, self.budget.seconds)

    def seconds_left(self) -> float | None:
        """Return the seconds until the time budget ends, at least 0; ``None`` without a time limit."""
        return None if self._max_seconds is None else max(0.0, self._max_seconds - self.elapsed_seconds())

    def seconds_until_cut(self) -> float | None:
        """Return the seconds until running work is cut off, which is ``GRACE_SECONDS`` after ``seconds_left``."""
        if self._max_seconds is None:
            return None
        return max(0.0, self._max_seconds + GRACE_SECONDS - self.elapsed_seconds())

    @property
    def is_exhausted(self) -> bool:
        """True if no further request can be paid for."""
        return min(self._compute_left(self._spent + self._reserved)) <= 0 or self.seconds_left() == 0.0

    def _compute_left(self, used: Amount) -> list[int]:
        """Return the amount left of each limit; ``sys.maxsize`` if there is none."""
        return [
            sys.maxsize if limit is None else limit - amount for limit, amount in zip(self._limits, used, strict=True)
        ]

    def _add_spend(self, spend: Usage) -> None:
        self._spent += Amount.from_usage(spend)
        # Exact integer sums: adding the rounded floats of each usage would accumulate errors.
        exact = {"flops": float(self._spent.flops), "cost": self._spent.money / MONEY_UNITS}
        self.usage = (self.usage + spend).model_copy(update=exact)


def _count_fits(available: int, need: int) -> int:
    if available == sys.maxsize:
        return available
    if need:
        return available // need
    return sys.maxsize if available >= 0 else -1
