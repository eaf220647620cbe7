"""The base of everything that a client may send."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A silently ignored field is a silently ignored budget: everything unknown is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class VerifierSpec(Strict):
    """What all kinds of verifiers have."""

    scores_steps: ClassVar[bool] = False
    """Whether it scores solutions that are not finished."""
    certain: ClassVar[bool] = False
    """Whether a score of 1 is a fact, so that nothing can be better."""
