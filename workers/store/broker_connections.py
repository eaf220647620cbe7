"""Connections to the broker: redis-py's, with refusals as ``BrokerRefused``.

They are raised where an answer is read, so that they count as lost connections everywhere: redis-py tries again while
it may, and connects anew, since the server behind an address can have become a replica; Celery's worker reconnects
instead of ending.
"""

from __future__ import annotations

from typing import Any, Final

import redis
from redis import asyncio as aioredis
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection

from workers.config.broker_address import BrokerAddress, Kind
from workers.store.broker_errors import find_refusal


class _Explained:
    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except redis.RedisError as error:
            if (refusal := find_refusal(error)) is None:
                raise
        raise refusal  # not inside of the handler: the answer to a login may quote the password


class _AsyncExplained:
    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)  # type: ignore[misc]
        except redis.RedisError as error:
            if (refusal := find_refusal(error)) is None:
                raise
        raise refusal


class _TcpConnection(_Explained, redis.Connection):
    pass


class _TlsConnection(_Explained, redis.SSLConnection):
    pass


class _UnixConnection(_Explained, redis.UnixDomainSocketConnection):
    host, port = "", 0  # redis-py reads them for its metrics when a first command fails


class _AsyncTcpConnection(_AsyncExplained, aioredis.Connection):
    pass


class _AsyncTlsConnection(_AsyncExplained, aioredis.SSLConnection):
    pass


class _AsyncUnixConnection(_AsyncExplained, AsyncUnixDomainSocketConnection):
    pass


CONNECTIONS: Final[dict[Kind, Any]] = {"tcp": _TcpConnection, "tls": _TlsConnection, "unix": _UnixConnection}
"""The class of blocking connections by kind of address."""
_ASYNC_CONNECTIONS: Final[dict[Kind, Any]] = {
    "tcp": _AsyncTcpConnection,
    "tls": _AsyncTlsConnection,
    "unix": _AsyncUnixConnection,
}


def make_client(address: BrokerAddress, **arguments: Any) -> redis.Redis:
    """Return a blocking client. ``arguments``: those of redis-py's connections."""
    pool = redis.ConnectionPool(CONNECTIONS[address.kind], **address.connection_arguments, **arguments)
    return redis.Redis.from_pool(pool)


def make_async_client(
    address: BrokerAddress, *, max_connections: int, wait_seconds: float, **arguments: Any
) -> aioredis.Redis:
    """Return a client for one event loop. ``arguments``: those of redis-py's connections.

    ``wait_seconds``: the time for which a command waits for a connection when all are in use.
    """
    pool = aioredis.BlockingConnectionPool(
        max_connections,
        wait_seconds,
        connection_class=_ASYNC_CONNECTIONS[address.kind],
        **address.connection_arguments,
        **arguments,
    )
    return aioredis.Redis.from_pool(pool)
