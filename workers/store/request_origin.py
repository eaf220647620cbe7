"""The request that submitted a job, for the logs and traces of the worker that runs it."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a job, stored with it."""

    request_id: str = ""
    traceparent: str = ""
    """The request's position in a trace as a W3C ``traceparent``; empty without tracing."""

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """The inverse of ``to_json``; fields of later versions are ignored."""
        stored = json.loads(text)
        return cls(stored.get("request_id", ""), stored.get("traceparent", ""))


ORIGIN: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 (it is frozen)
"""The origin of the request being handled, stored with the jobs that it submits."""
