"""Rates, quotas and caps of owners: ``[limits]`` in ``reasoner.toml``, overridden by ``[limits.OWNER]``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

UNKNOWN_WAIT_SECONDS = 5
"""The time after which to try again where the store has no estimate."""
Count = Annotated[int, Field(ge=1)]


class QuotaExceeded(Exception):
    """An owner's quota is used up. ``retry_after``: seconds until it may not be."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits on all jobs of one owner together, enforced by the store."""

    jobs: int | None = None
    tokens_a_day: int | None = None

    def to_json(self) -> str:
        """Return the argument of the store's scripts; empty if nothing is limited."""
        limited = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(limited) if limited else ""

    def exceeded(self, what: str, used: int, retry_after: int) -> QuotaExceeded:
        """Return the exception for the refusal of a script."""
        if what == "jobs":
            message = f"{used} jobs are unfinished, and the limit is {self.jobs}"
            return QuotaExceeded(message, retry_after or UNKNOWN_WAIT_SECONDS)
        message = f"{used} of {self.tokens_a_day} tokens of this day (UTC) are spent, or reserved by unfinished jobs"
        return QuotaExceeded(message, retry_after)


@dataclass(frozen=True, slots=True)
class Share:
    """An owner's part of a queue in which others wait, too."""

    weight: float = 1.0
    running: int | None = None
    """The maximum number of jobs that run at once."""


class Limits(BaseModel):
    """Limits of an owner. ``None``: no limit other than those of all jobs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests_per_second: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The average rate of requests of one key: its token bucket fills at this rate."
    )
    burst: Count | None = Field(
        None, description="The capacity of the token bucket; by default the requests of one second."
    )
    weight: Annotated[float, Field(ge=0.001, le=1000)] = Field(
        1.0, description="The share of the owner's jobs in a queue where others wait, too, relative to that of others."
    )
    streams: Count = Field(
        500, description="The maximum number of open requests of one key in one API process, streams included."
    )
    jobs: Count | None = Field(None, description="The maximum number of the owner's unfinished jobs.")
    running: Count | None = Field(
        None, description="The maximum number of the owner's jobs that run at once; the others wait in the queue."
    )
    tokens_a_day: Count | None = Field(
        None, description="The maximum number of tokens of the owner's jobs per day (UTC); a job reserves its budget."
    )
    tokens: Count | None = Field(
        None, description="The maximum token budget of a job, and of a batch for each of its jobs."
    )
    seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The maximum time budget of a job in seconds."
    )
    n: Count = Field(1024, description="The maximum number of solutions of a job, and of candidates.")
    message_chars: Count = Field(
        1 << 20, description="The maximum number of characters of a message, and of any other text of a job."
    )
    file_bytes: Count = Field(10 << 30, description="The maximum number of bytes of all of the owner's files together.")
    depth: Count | None = Field(None, description="The maximum number of steps of a job's search.")

    @property
    def quota(self) -> Quota:
        """The limits enforced by the store."""
        return Quota(self.jobs, self.tokens_a_day)

    @property
    def share(self) -> Share:
        """The part of the limits that decides when jobs start."""
        return Share(self.weight, self.running)

    @property
    def bucket(self) -> tuple[float, int] | None:
        """The fill rate per second and the capacity of the token bucket."""
        if self.requests_per_second is None:
            return None
        return self.requests_per_second, self.burst or math.ceil(self.requests_per_second)


class LimitsTable(Limits):
    """The limits of all owners, and those of single owners."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Limits]

    @model_validator(mode="before")
    @classmethod
    def _limits_or_owners(cls, table: Any) -> Any:
        for name, value in table.items() if isinstance(table, dict) else ():
            if name not in Limits.model_fields and not isinstance(value, (dict, Limits)):
                known = ", ".join(Limits.model_fields)
                raise ValueError(f"there is no limit {name!r}; known are {known}, and [limits.OWNER] for one owner's")
        return table

    @property
    def shares(self) -> dict[str, Share]:
        """The shares by owner; that of owners without a table has the empty name."""
        return {"": self.share} | {owner: self.for_owner(owner).share for owner in self.__pydantic_extra__}

    def for_owner(self, owner: str) -> Limits:
        """Return the limits of one owner."""
        defaults = {name: getattr(self, name) for name in Limits.model_fields}
        own = self.__pydantic_extra__.get(owner)
        return Limits(**defaults | (own.model_dump(exclude_unset=True) if own is not None else {}))
