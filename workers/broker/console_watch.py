"""Lines about the broker on the console of ``reasoner serve``."""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.config.broker_address import parse_broker_url
from workers.store.broker_connections import make_client
from workers.store.broker_errors import (
    BROKER_DOWN,
    WRITE_PROBE,
    describe_eviction,
    describe_outage,
    read_eviction_policy,
)

CHECK_SECONDS = 2.0
_TIMEOUT_SECONDS = 1.0


class BrokerWatch:
    """Says when a broker stops and begins to work."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        """``say``: prints a line."""
        self._report = say
        self._client = make_client(
            parse_broker_url(url),
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._outage = ""
        self._due = 0.0

    def check_policy(self) -> None:
        """Say if the broker evicts; nothing while it is away."""
        try:
            policy = read_eviction_policy(self._client.info("memory"))
        except BROKER_DOWN:
            return
        if warning := describe_eviction(policy):
            self._report(warning)

    def check_when_due(self) -> None:
        """Ask the broker to write, unless it was asked a moment ago, and say what has changed."""
        if time.monotonic() < self._due:
            return
        outage = ""
        try:
            self._client.execute_command(*WRITE_PROBE)  # type: ignore[no-untyped-call]
        except BROKER_DOWN as error:
            outage = describe_outage(error)
        if outage != self._outage:
            self._report(outage or "the broker works again")
        self._outage = outage
        self._due = time.monotonic() + CHECK_SECONDS
