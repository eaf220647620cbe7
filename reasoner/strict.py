"""The base of everything that a client may send."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A silently ignored field is a silently ignored budget: everything unknown is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
