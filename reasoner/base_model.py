"""The base of everything that a client may send."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator


class StrictModel(BaseModel):
    """A silently ignored field is a silently ignored budget: everything unknown is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _true_is_no_number(cls, value: Any, take: ValidatorFunctionWrapHandler) -> Any:
        """A budget of ``true`` tokens would be one of 1."""
        taken = take(value)
        if isinstance(value, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
            raise ValueError("give a number: true and false are none")
        return taken


class VerifierSpec(StrictModel):
    """What all kinds of verifiers have."""

    scores_steps: ClassVar[bool] = False
    """Whether it scores solutions that are not finished."""
    is_conclusive: ClassVar[bool] = False
    """Whether a score of 1 is a fact, so that nothing can be better."""
