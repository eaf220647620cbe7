"""Where a job comes from: the request that submitted it, for the logs and traces of whoever runs it."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Kept with the job."""

    request_id: str = ""
    traceparent: str = ""
    """The request's place in a trace, in the words of W3C Trace Context; empty without traces."""

    def to_json(self) -> str:
        """How it stands in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """The inverse; fields of a later version are passed over."""
        told = json.loads(text)
        return cls(told.get("request_id", ""), told.get("traceparent", ""))


ORIGIN: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 (it is frozen)
"""Of the request that is being answered here; what it submits remembers it."""
