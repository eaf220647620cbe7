"""Reservations of branches: the budget that is held for what each of them may still generate."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence

from reasoner.budget.prices import NO_AMOUNT, Amount, TokenRate
from reasoner.search.generation import Generation
from reasoner.search.stream_context import StreamContext


class Reservations:
    """Reserves the budget of a search for its branches."""

    def __init__(self, context: StreamContext) -> None:
        self._ledger = context.search.ledger
        self._rates = [self._ledger.rate_of_model(policy.model) for policy in context.search.policies]
        self._counts_prompts = self._ledger.budget.flops is not None or self._ledger.budget.cost is not None
        self._longest = context.longest

    def rate(self, branch: Generation) -> TokenRate:
        """Return the FLOPs and the price of a token of the branch's policy."""
        return self._rates[branch.parent.policy]

    def select(
        self, waiting: Sequence[Generation], in_flight: Collection[Generation]
    ) -> tuple[Sequence[Generation], int]:
        """Return the first branches, as many as the budget can reserve a sensible length for, and that length.

        It is the number of tokens for each of them, 0 for none. If the budget holds less than one sensible length, the
        first branch gets what is left, but only if nothing in flight may release enough.
        """
        sensible = max(min(branch.tokens_left, self._longest.get(branch.op, branch.tokens_left)) for branch in waiting)
        count = self._max_branches_that_fit(waiting, sensible, in_flight)
        if count == 0 and in_flight:
            return [], 0
        starting = waiting[: max(1, count)]
        verification = self._expected_verification(waiting[:count], sensible, in_flight)
        return starting, self._max_tokens_per_branch(starting, verification)

    def reserve(self, branch: Generation, tokens: int) -> None:
        """Reserve ``tokens`` for a branch, or all that it may have."""
        branch.reservation = self._max_amount([branch], tokens)
        self._ledger.reserve(branch.reservation)

    def _max_branches_that_fit(
        self, waiting: Sequence[Generation], tokens: int, in_flight: Collection[Generation]
    ) -> int:
        """Return the number of branches, from the first, for which the budget can reserve ``tokens`` each."""

        def exceeds(count: int) -> bool:
            branches = waiting[:count]
            return not self._fits_budget(branches, tokens, self._expected_verification(branches, tokens, in_flight))

        return bisect(range(1, len(waiting) + 1), False, key=exceeds)

    def _max_tokens_per_branch(self, branches: Sequence[Generation], verification: Amount) -> int:
        """Return the largest number of tokens that the budget can reserve for each of the branches."""
        longest = max(branch.tokens_left for branch in branches)
        return bisect(
            range(1, longest + 1), False, key=lambda tokens: not self._fits_budget(branches, tokens, verification)
        )

    def _fits_budget(self, branches: Sequence[Generation], tokens: int, verification: Amount) -> bool:
        """Return True if the budget can reserve ``tokens`` for each branch (or its limit) beside ``verification``."""
        amount = self._max_amount(branches, tokens) + verification
        is_answer = all(branch.op == "complete" for branch in branches)
        return self._ledger.max_affordable(amount, may_use_answer_reserve=is_answer) >= 1

    def _expected_verification(
        self, branches: Sequence[Generation], tokens: int, in_flight: Collection[Generation]
    ) -> Amount:
        """Estimate what verifying these branches and those in flight will take, from what it took so far.

        A branch that cannot be scored is worth little. The estimate is zero for no branches.
        """
        usage = self._ledger.usage
        if not branches or not usage.verifier_computed:
            return NO_AMOUNT
        reserved = ((branch.op, branch.reservation.tokens) for branch in in_flight)
        expected = sum(min(most, self._longest.get(op, most)) for op, most in reserved)
        expected += sum(min(branch.tokens_left, tokens) for branch in branches)
        return Amount(tokens=expected * usage.verifier_computed // max(1, usage.generated))

    def _max_amount(self, branches: Sequence[Generation], tokens: int) -> Amount:
        """Return the most that ``tokens`` more for each branch can cost."""
        generated, prompts = [0] * len(self._rates), [0] * len(self._rates)
        for branch in branches:
            count = min(branch.tokens_left, tokens)
            generated[branch.parent.policy] += count
            if self._counts_prompts:
                prompts[branch.parent.policy] += branch.count_prompt_tokens(count)
        most = zip(self._rates, prompts, generated, strict=True)
        return sum((rate.max_branch_amount(*counts) for rate, *counts in most), start=NO_AMOUNT)
