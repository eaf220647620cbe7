"""Celery's transport for messages that may be lost.

Celery's Redis transport makes messages survive their worker: it copies each into a hash, removes it when the task is
done, and restores the rest when a connection closes or after a timeout. Wake-ups do not need that, since the reaper
sends another one. It even does harm when the broker goes away: a worker that could not restore its messages ended, and
with it all its running searches.
"""

from __future__ import annotations

from typing import Any, Final

from celery.app.amqp import AMQP
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.redis import Channel, Transport

from workers.config.broker_address import BrokerAddress
from workers.store.broker_connections import get_connection_class
from workers.store.broker_errors import WRITE_PROBE

CELERY_URL: Final = "reasoner://broker"
"""The broker's URL for Celery: it only selects the transport, which connects to the address in the options."""
ADDRESS: Final = "reasoner_address"
"""The transport option with the broker's ``BrokerAddress``."""
_TCP_ARGUMENTS: Final = ("host", "port", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")
TRANSPORT_ALIASES["reasoner"] = f"{__name__}:WakeupTransport"


class _Channel(Channel):  # type: ignore[misc]
    ack_emulation = False
    do_restore = False

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Connect to the address in the options as the store does: kombu reads URLs, and verifies TLS, differently."""
        address: BrokerAddress = self.connection.client.transport_options[ADDRESS]
        self.connection_class = get_connection_class(address)
        arguments: dict[str, Any] = super()._connparams(asynchronous)
        if address.sentinels:
            arguments = {name: value for name, value in arguments.items() if name not in ("host", "port")}
        if address.kind == "unix":
            arguments = {name: value for name, value in arguments.items() if name not in _TCP_ARGUMENTS}
        return arguments | address.connection_arguments


class WakeupTransport(Transport):  # type: ignore[misc]
    Channel = _Channel

    def establish_connection(self) -> Any:
        """Connect, and fail like a broker that is away if it cannot write: otherwise each fetch would reconnect."""
        connection = super().establish_connection()
        try:
            self._avail_channels[-1].client.execute_command(*WRITE_PROBE)
        except Exception:
            self.close_connection(connection)
            raise
        return connection


class _Connection(Connection):  # type: ignore[misc]
    def as_uri(self, *_: Any, **__: Any) -> str:
        """Return the address for logs."""
        address: BrokerAddress = self.transport_options[ADDRESS]
        return address.public_url

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Retry every 2 seconds at least, so that work goes on soon after the broker returns. The default is 32."""
        intervals = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 2.0}
        return super().ensure_connection(*args, **(intervals | kwargs))


class WakeupAMQP(AMQP):  # type: ignore[misc]
    """Value of ``Celery(amqp=…)`` for this transport."""

    Connection = _Connection
