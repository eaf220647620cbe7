"""The limits of one job, as a client gives them. This model is part of the REST schema."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reasoner.base_model import StrictModel

MAX_BUDGET_TOKENS = 10_000_000
MAX_BUDGET_SECONDS = 86_400.0
MAX_BUDGET_FLOPS = 1e24
MAX_BUDGET_COST = 1e6


class Budget(StrictModel):
    """The most that a job may spend; the first limit that is reached ends the search."""

    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] | None = Field(
        None, description="Generated tokens plus tokens that the verifier computes."
    )
    thinking_tokens: Annotated[int, Field(ge=0, le=MAX_BUDGET_TOKENS)] | None = Field(
        None,
        description="Tokens of a single solution's thought, after which it is closed and the answer asked for.",
    )
    seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS)] | None = Field(
        None, description="Seconds of work, waiting in the queue not included."
    )
    flops: Annotated[float, Field(gt=0, le=MAX_BUDGET_FLOPS)] | None = Field(
        None, description="Two per weight and computed token, of the model and of the verifier."
    )
    cost: Annotated[float, Field(gt=0, le=MAX_BUDGET_COST)] | None = Field(
        None, description="Money, by the prices that the service is configured with."
    )
    effort: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="Name of a budget that the service is configured with: minimal, low, medium, high, …"
    )

    @property
    def is_open(self) -> bool:
        """Return True if it sets no limit for the job; a limit of single thoughts does not end a job."""
        return self.model_copy(update={"thinking_tokens": None}) == Budget()

    def or_default(self, default: Budget) -> Budget:
        """Return the default if this budget is open, with this budget's limit of single thoughts if it has one."""
        if not self.is_open:
            return self
        if self.thinking_tokens is None:
            return default
        return default.model_copy(update={"thinking_tokens": self.thinking_tokens})
