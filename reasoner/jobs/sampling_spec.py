"""The sampling parameters of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import Field

from reasoner.base_model import StrictModel
from reasoner.budget.spec import MAX_BUDGET_TOKENS

MAX_TOP_K = 1_000_000
"""Larger than any vocabulary."""
MaxTokens = Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

NEUTRAL: Final[dict[str, float]] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
}
"""Sampling parameters that change nothing."""


class Sampling(StrictModel):
    """Sampling parameters. Those left open are the model's own (its generation_config.json), else they change nothing.

    A stored job has the values in use, unless it was accepted while no engine answered.
    """

    temperature: Annotated[float, Field(ge=0, le=10)] | None = Field(None, description="The model's own, else 1.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="The model's own, else 1.")
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = Field(
        None, description="The model's own, else 0: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="The model's own, else 0.")
    frequency_penalty: Penalty | None = Field(
        None,
        description="0 by default. Subtracted from a token's logit for each time that the solution has it already, "
        "also in its thought. Greedy solutions are chosen by these logits, too.",
    )
    presence_penalty: Penalty | None = Field(
        None, description="0 by default. Subtracted once if the solution has the token already."
    )
    thinking_tokens: Annotated[int, Field(ge=0, le=MAX_BUDGET_TOKENS)] | None = Field(
        None, description="As in budget: the smaller one holds."
    )
    kv_budget: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] | None = Field(
        None,
        description="Most tokens of a solution, its prompt included, whose keys and values the engine keeps while it "
        "thinks: beyond it pages of the thought are dropped at random, which changes what follows. The latest pages "
        "and the answer stay. Without it all are kept.",
        exclude_if=lambda budget: budget is None,
    )
    max_tokens: MaxTokens | None = Field(
        None, description="Longest solution in tokens; without it the model's context is the limit."
    )

    @property
    def counts_tokens(self) -> bool:
        """True if the distribution of a token depends on the number of times that the solution has it."""
        return bool(self.frequency_penalty or self.presence_penalty)

    @property
    def of_engine(self) -> dict[str, Any]:
        """The parameters that are set and are the engine's, by their names in ``SamplingParams``."""
        return self.model_dump(exclude_none=True, exclude={"max_tokens", "thinking_tokens"})

    def fill(self, defaults: Mapping[str, float]) -> Self:
        """Return the parameters in which those left open have the defaults, or else change nothing."""
        open_ones = {name: value for name, value in {**NEUTRAL, **defaults}.items() if getattr(self, name, 0) is None}
        return self.model_copy(update=open_ones)
