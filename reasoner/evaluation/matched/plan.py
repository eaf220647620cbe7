"""The plan of a matched evaluation: strategies, the quantity that is equal, its budgets, and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from reasoner.budget.spec import Budget
from reasoner.evaluation.plan import GREEDY, MAJORITY, POOL, EvaluationPlan, Stage, StageBudget, StrategyCase


class Quantity(StrEnum):
    """The quantity of which every strategy may spend the same amount."""

    TOKENS = "tokens"
    SECONDS = "seconds"
    FLOPS = "flops"
    COST = "cost"

    @property
    def column(self) -> str:
        """Name of the attribute of ``Run`` with what was spent."""
        return "total_tokens" if self is Quantity.TOKENS else str(self)

    def write_amount(self, amount: float) -> str:
        """Return an amount for a table."""
        if self is Quantity.TOKENS:
            return f"{amount:.0f}"
        return f"{amount:.2f}" if self is Quantity.SECONDS else f"{amount:.4g}"


@dataclass(frozen=True, slots=True)
class MatchedPlan:
    """The strategies, budgets and seeds of a matched evaluation.

    Cases in ``pooled`` decide on one pool of samples, of which each may use as many as a budget pays for; cases in
    ``live`` run as jobs with the budget. Seconds cannot be replayed: there all but the curves of the pool is live.
    """

    model: str
    quantity: Quantity
    budgets: tuple[float, ...]
    """Amounts for one problem, the smallest first."""
    pooled: tuple[StrategyCase, ...]
    live: tuple[StrategyCase, ...]
    baseline: str = MAJORITY
    """Label of the case with which the others are compared at the same budget."""
    seeds: int = 1

    @property
    def cases(self) -> tuple[StrategyCase, ...]:
        """The cases that run at each budget; greedy decoding, which needs none, is not among them."""
        return tuple(case for case in (*self.pooled, *self.live) if case.name != GREEDY)

    @property
    def replayed(self) -> tuple[StrategyCase, ...]:
        """The cases that spend each budget on samples of the pool."""
        return () if self.quantity is Quantity.SECONDS else self.pooled

    def to_evaluation(self) -> EvaluationPlan:
        """Return the same strategies as the plan of an evaluation without budgets."""
        return EvaluationPlan(self.model, self.pooled, self.live, ns=(1,), live_ns=(1,), seeds=self.seeds)

    def pool_stage(self, seed: int) -> Stage:
        """Return the stage that draws the pool of a seed and decides on it."""
        return Stage(POOL, self.model, seed, case=None, n=1)

    def greedy_stage(self) -> Stage:
        """Return the stage of greedy decoding. It is deterministic and without a budget, so it runs once."""
        return Stage(GREEDY, self.model, seed=0, case=StrategyCase(GREEDY, GREEDY), n=1)

    def live_stage(self, case: StrategyCase, budget: float, seed: int, n: int) -> Stage:
        """Return the stage of a live case with a budget, at an n that the budget pays for."""
        limit = StageBudget(str(self.quantity), budget)
        return Stage(f"{case.label} {self.quantity}={budget:g}", self.model, seed, case=case, n=n, budget=limit)

    def list_live_cases(self) -> list[StrategyCase]:
        """Return the cases that run as jobs of their own, greedy decoding not among them."""
        return [case for case in self.cases if case not in self.replayed]

    def count_stages(self) -> int:
        """Return the number of stages."""
        return 1 + self.seeds * (1 + len(self.list_live_cases()) * len(self.budgets))

    def document(self) -> dict[str, Any]:
        """Return everything that determines the runs, as JSON."""
        return {
            "matched": str(self.quantity),
            "budgets": list(self.budgets),
            "strategies": [case.label for case in (*self.pooled, *self.live)],
        }


def parse_budgets(quantity: Quantity, text: str) -> tuple[float, ...]:
    """Parse amounts separated by commas; sorted. Raises ``ValueError`` that says what would be right."""
    budgets = set()
    for item in text.split(","):
        try:
            amount = float(item.strip().replace("_", ""))
            Budget.model_validate({quantity: amount})
        except ValidationError as error:
            raise ValueError(f"{item.strip()!r} is no budget of {quantity}: {error.errors()[0]['msg']}") from None
        except ValueError:
            raise ValueError(f"{item.strip()!r} is no number: give {quantity}, such as 500,2000,8000") from None
        budgets.add(amount)
    return tuple(sorted(budgets))
