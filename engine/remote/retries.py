"""Waits between the attempts of a request that a server could not serve for the moment."""

from __future__ import annotations

from engine.protocol.types import EngineUnavailable, EngineUnreachable

_WAITS_SECONDS = (0.25, 0.5, 1.0, 2.0)
"""Before each further attempt without any progress."""
MAX_WAIT_SECONDS = 10.0
"""The longest wait that a server may ask for (``Retry-After``); for a longer one the job is handed back."""


class Retries:
    """The attempts of one request. Progress, which is a received token, starts the count again."""

    def __init__(self, *, should_wait: bool) -> None:
        """``should_wait``: False if a replica can take over, so that one retry is enough."""
        self._waits = _WAITS_SECONDS if should_wait else _WAITS_SECONDS[:1]
        self._count = 0

    def next_wait(self, error: EngineUnavailable, *, has_progress: bool) -> float | None:
        """Return the seconds to wait before the next attempt; ``None`` if the error is final."""
        if has_progress:
            self._count = 0
        # The connection has its own retries for a server that cannot be reached.
        if self._count == len(self._waits) or isinstance(error, EngineUnreachable):
            return None
        wait = max(self._waits[self._count], error.retry_after or 0.0)
        self._count += 1
        return wait if wait <= MAX_WAIT_SECONDS else None
