"""Celery's transport for messages that may be lost.

Celery's Redis transport makes messages survive their worker: it copies each into a hash, removes it when the task is
done, and restores the rest when a connection closes or after a timeout. Wake-ups do not need that, since the reaper
sends another one. It even does harm when the broker goes away: a worker that could not restore its messages ended, and
with it all its running searches.
"""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection
from kombu.transport.redis import Channel, Transport


class _Channel(Channel):  # type: ignore[misc]
    ack_emulation = False
    do_restore = False


class _Transport(Transport):  # type: ignore[misc]
    Channel = _Channel


class _Connection(Connection):  # type: ignore[misc]
    def get_transport_cls(self) -> type[_Transport]:
        """Return the transport for any URL, since each broker speaks the protocol of Redis."""
        return _Transport

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Retry every 2 seconds at least, so that work goes on soon after the broker returns. The default is 32."""
        intervals = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 2.0}
        return super().ensure_connection(*args, **(intervals | kwargs))


class WakeupAMQP(AMQP):  # type: ignore[misc]
    """Value of ``Celery(amqp=…)`` that selects this transport."""

    Connection = _Connection
