"""Celery's connection to the broker, for messages that may be lost.

Celery means a message to survive the worker that took it: it copies each into a hash of the broker's, takes it out when
the work is done, and puts what is left back when a connection closes or after a time-out. A wake-up needs none of that,
since the reaper sends another one, and in the moment in which a broker goes away all of it stands in the way: a worker
that could not put its messages back ended, with every search that it had in hand.
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
        """Of all addresses: a broker is Redis or speaks as it does."""
        return _Transport

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Looks often enough for work to go on soon after a broker has come back, however long it was away; by itself
        it would pause for half a minute."""
        often = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 2.0}
        return super().ensure_connection(*args, **(often | kwargs))


class WakeupAMQP(AMQP):  # type: ignore[misc]
    """What ``Celery(amqp=…)`` takes."""

    Connection = _Connection
