"""What the keys of an owner may use: rates, quotas and caps.

``reasoner.toml`` says it for everybody in ``[limits]`` and for one owner in ``[limits.OWNER]``, which goes before.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_WAIT_FOR_A_JOB = 5
"""Seconds. Nobody knows when one ends."""
Count = Annotated[int, Field(ge=1)]


class QuotaExceeded(Exception):
    """The owner has as much as may be; the message says of what, ``retry_after`` when (s) there may be more."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Quota:
    """What one owner's jobs may take together, as the store holds them to it."""

    jobs: int | None = None
    tokens_a_day: int | None = None

    def to_json(self) -> str:
        """For the scripts of the store; empty where nothing is limited."""
        limited = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(limited) if limited else ""

    def exceeded(self, what: str, used: int, retry_after: int) -> QuotaExceeded:
        """What a script that refused means."""
        if what == "jobs":
            return QuotaExceeded(f"{used} jobs have not ended, and {self.jobs} may be at once", _WAIT_FOR_A_JOB)
        message = f"{used} of {self.tokens_a_day} tokens of this day (UTC) are spent, or booked by jobs that go on"
        return QuotaExceeded(message, retry_after)


class Limits(BaseModel):
    """``None`` is no limit beside those that hold for every job."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests_per_second: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Of one key, on average: a bucket that fills at this rate."
    )
    burst: Count | None = Field(None, description="What fits into the bucket; a second's requests by default.")
    streams: Count = Field(
        500, description="Requests of one key that are open at once in one API process: streams, and whoever waits."
    )
    jobs: Count | None = Field(None, description="Jobs of the owner that have not ended.")
    tokens_a_day: Count | None = Field(
        None,
        description="Tokens that the owner's jobs of one day (UTC) may spend; a job books its budget until it ends.",
    )
    tokens: Count | None = Field(None, description="Largest budget of a job; of a batch, for each of its jobs.")
    seconds: Annotated[float, Field(gt=0)] | None = Field(None, description="Largest budget of a job.")
    n: Count | None = Field(None, description="Most solutions that a job may ask for.")
    depth: Count | None = Field(None, description="Most steps that a job's search may take.")

    @property
    def quota(self) -> Quota:
        """What the store holds the owner to."""
        return Quota(self.jobs, self.tokens_a_day)

    @property
    def bucket(self) -> tuple[float, int] | None:
        """Requests a second, and how many at once."""
        if self.requests_per_second is None:
            return None
        return self.requests_per_second, self.burst or math.ceil(self.requests_per_second)


class LimitsTable(Limits):
    """The limits of everybody, and beside them those of single owners."""

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

    def of(self, owner: str) -> Limits:
        """What holds for one owner."""
        everybody = {name: getattr(self, name) for name in Limits.model_fields}
        own = self.__pydantic_extra__.get(owner)
        return Limits(**everybody | (own.model_dump(exclude_unset=True) if own is not None else {}))
