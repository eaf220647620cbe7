"""The journal's entries as clients see them. This model is part of the REST schema."""

from __future__ import annotations

from pydantic import Field, JsonValue

from reasoner.base_model import StrictModel

MAX_SEQ = 2**53
"""Largest sequence number of an event: more than any job has, and exact in JavaScript."""


class Event(StrictModel):
    """One entry of a job's journal. ``seq`` counts from 1 without gaps; a replay uses entries that have a ``key``."""

    seq: int
    type: str
    at: float
    key: str | None = None
    data: dict[str, JsonValue]
    spend: dict[str, float] = Field(default_factory=dict)
    """Addition to the bill: the fields of ``Usage`` that are not 0. All of a job's add up to its ``usage``."""
