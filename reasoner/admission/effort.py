"""Named budgets: an operator sets the limits of an effort such as ``low``, and a client gives only its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.protocol.types import InvalidRequest
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import StrategySpec
from reasoner.strategies.registry import parse_params

LIMITS = ("tokens", "seconds", "flops", "cost")


def _parse_bare_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _check_params(strategy: StrategySpec) -> StrategySpec:
    parse_params(strategy.name, strategy.params)
    return strategy


DefaultStrategy = Annotated[StrategySpec, BeforeValidator(_parse_bare_name), AfterValidator(_check_params)]
"""A strategy in an operator's settings: a name, or a name with parameters."""


class Effort(StrictModel):
    """Limits of a named effort, and the strategy of jobs that choose none."""

    tokens: int | None = None
    seconds: float | None = None
    flops: float | None = None
    cost: float | None = None
    thinking_tokens: int | None = Field(
        None, description="Tokens of a single solution's thought; jobs with a lower limit of their own keep it."
    )
    strategy: DefaultStrategy | None = Field(None, description="A name, or a name with parameters.")

    @model_validator(mode="after")
    def _check_any_limit(self) -> Self:
        if self.budget.is_open:
            raise ValueError(f"give at least one of {', '.join(LIMITS)}")
        return self

    @property
    def budget(self) -> Budget:
        """Limits as a budget. Raises ``ValidationError`` for an invalid one."""
        return Budget(**{name: getattr(self, name) for name in (*LIMITS, "thinking_tokens")})


def _create_default(tokens: int, strategy: str, **params: int) -> Effort:
    return Effort(tokens=tokens, strategy=StrategySpec.model_validate({"name": strategy, **params}))


DEFAULT_EFFORTS: dict[str, Effort] = {
    "minimal": _create_default(2_000, "greedy"),
    "low": _create_default(5_000, "weighted_vote", n=4),
    "medium": _create_default(20_000, "weighted_vote", n=16),
    "high": _create_default(80_000, "weighted_vote", n=64),
    "xhigh": _create_default(320_000, "weighted_vote", n=256),
    "max": _create_default(1_280_000, "weighted_vote", n=256),
    "none": _create_default(2_000, "greedy"),
}


def find_contradiction(budget: Budget, efforts: Mapping[str, Effort]) -> InvalidRequest | None:
    """Return the fault of a budget whose effort is unknown, or sets other limits than the budget itself."""
    name = budget.effort
    if name is None:
        return None
    if name not in efforts:
        return InvalidRequest(
            f"budget.effort: there is no effort {name!r}; known are {', '.join(efforts)}", "budget.effort"
        )
    limits = efforts[name].budget
    for limit in LIMITS:
        if getattr(budget, limit) not in (None, getattr(limits, limit)):
            return InvalidRequest(
                f"budget.{limit}: effort {name!r} sets the limits ({_describe(limits)}): leave out {limit}, or effort",
                f"budget.{limit}",
            )
    return None


def _describe(budget: Budget) -> str:
    limits = budget.model_dump(include=set(LIMITS), exclude_none=True)
    return ", ".join(f"{name} {value:g}" for name, value in limits.items())
