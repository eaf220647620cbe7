"""The position in a job's event stream, and whether to connect again after the stream broke off."""

from __future__ import annotations

from typing import Any

import httpx

from reasoner.client._errors import ServiceError
from reasoner.client._requests import CONNECT_SECONDS, PAUSE_SECONDS, job_path
from reasoner.jobs.events import Event
from reasoner.jobs.job import find_end

SILENCE_SECONDS = 60.0
"""Longest silence on an event stream; the service sends a comment far more often."""
MAX_RECONNECTS = 5
"""Connections in a row that may bring no event."""
STREAM_TIMEOUT = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)


class EventCursor:
    """Reads the lines of a job's event stream over any number of connections.

    A stream is complete when the service ends it after a terminal event: the events of a job that was retried go on
    after the terminal event of its earlier run.
    """

    def __init__(self, url: str, job_id: str, after: int) -> None:
        self._url = url
        self._job_id = job_id
        self._after = after
        self._num_failures = 0
        self._has_ended = False

    @property
    def path(self) -> str:
        """The address of the job's events."""
        return job_path(self._job_id, "/events")

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of a request for the events after the last one read."""
        return {"starting_after": self._after}

    def read(self, line: str) -> Event | None:
        """Return the event in a line of the stream, or None for other lines."""
        if not line.startswith("data:"):
            return None
        event = Event.model_validate_json(line.removeprefix("data:").strip())
        self._num_failures, self._after = 0, event.seq
        self._has_ended = find_end(event.type) is not None
        return event

    def is_complete(self, status: int) -> bool:
        """Return True if a connection with this HTTP status ended because there are no more events to come.

        Raises ``ServiceError`` if connections end early too often in a row.
        """
        if self._has_ended or status == httpx.codes.NO_CONTENT:
            return True
        self._count_failure(ServiceError(f"the event stream of {self._url} ends before the job does"))
        return False

    def pause_after(self, error: httpx.TransportError | ServiceError) -> float:
        """Return the seconds to wait before the next connection. Raises ``ServiceError`` if there should be none."""
        if isinstance(error, ServiceError):
            if not error.is_transient:
                raise error
            self._count_failure(error)
            return PAUSE_SECONDS
        self._count_failure(ServiceError(f"lost the event stream of {self._url}: {error}"))
        return 0.0

    def _count_failure(self, error: ServiceError) -> None:
        if self._num_failures == MAX_RECONNECTS:
            raise error
        self._num_failures += 1
