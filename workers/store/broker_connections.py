"""Connections to the broker: redis-py's, with refusals as ``BrokerRefused``.

They are raised where an answer is read, so that they count as lost connections everywhere: redis-py tries again while
it may, and connects anew, since the server behind an address can have become a replica; Celery's worker reconnects
instead of ending.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import redis
from redis import asyncio as aioredis
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.config.broker_address import BrokerAddress, Kind
from workers.store.broker_errors import BrokerRefused, find_refusal

_SENTINEL_SECONDS: Final = 1.0
"""The time in which a Sentinel answers, before the next one is asked."""
_FIND_PRIMARY: Final = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME")


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


class _FindsPrimary:
    """Asks Sentinels for the primary whenever it connects: after a failover that is another server."""

    def __init__(
        self,
        *,
        sentinels: Sequence[tuple[str, int]],
        service: str,
        sentinel_login: tuple[str | None, str | None],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        user, password = sentinel_login
        tls = {name: value for name, value in arguments.items() if name.startswith("ssl_")}
        self.host, self.port = sentinels[0]  # in messages, until a Sentinel has answered
        self._sentinels = sentinels
        self._service = service
        self._sentinel_arguments: dict[str, Any] = {
            **({"ssl": True} | tls if tls else {}),
            "username": user,
            "password": password,
            "socket_timeout": _SENTINEL_SECONDS,
            "socket_connect_timeout": _SENTINEL_SECONDS,
            "decode_responses": True,
        }

    def _choose_primary(self, answers: Sequence[Sequence[Any] | None]) -> None:
        """Connect to the first primary that a Sentinel has named. Raises ``BrokerRefused`` if none has."""
        found = next((answer for answer in answers if answer), None)
        if found is None:
            reason = f"the Sentinels know no primary {self._service!r}" if answers else "no Sentinel answers"
            raise BrokerRefused(f"the broker cannot be found: {reason}")
        self.host, self.port = str(found[0]), int(found[1])


class _BlockingSearch(_FindsPrimary):
    def _connect(self) -> Any:
        answers: list[Any] = []
        for host, port in self._sentinels:
            with (
                contextlib.suppress(redis.RedisError),
                redis.Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **self._sentinel_arguments) as sentinel,
            ):
                answers.append(sentinel.execute_command(*_FIND_PRIMARY, self._service))
            if answers and answers[-1]:
                break
        self._choose_primary(answers)
        return super()._connect()  # type: ignore[misc]


class _AsyncSearch(_FindsPrimary):
    async def _connect(self) -> Any:
        answers: list[Any] = []
        for host, port in self._sentinels:
            sentinel = aioredis.Redis(
                host=host, port=port, retry=AsyncRetry(NoBackoff(), 0), **self._sentinel_arguments
            )
            try:
                answers.append(await sentinel.execute_command(*_FIND_PRIMARY, self._service))  # type: ignore[no-untyped-call]
            except redis.RedisError:
                continue
            finally:
                await sentinel.aclose()
            if answers[-1]:
                break
        self._choose_primary(answers)
        return await super()._connect()  # type: ignore[misc]


class _SentinelTcpConnection(_BlockingSearch, _TcpConnection):
    pass


class _SentinelTlsConnection(_BlockingSearch, _TlsConnection):
    pass


class _AsyncSentinelTcpConnection(_AsyncSearch, _AsyncTcpConnection):
    pass


class _AsyncSentinelTlsConnection(_AsyncSearch, _AsyncTlsConnection):
    pass


_CONNECTIONS: Final[dict[tuple[Kind, bool], tuple[Any, Any]]] = {
    ("tcp", False): (_TcpConnection, _AsyncTcpConnection),
    ("tls", False): (_TlsConnection, _AsyncTlsConnection),
    ("unix", False): (_UnixConnection, _AsyncUnixConnection),
    ("tcp", True): (_SentinelTcpConnection, _AsyncSentinelTcpConnection),
    ("tls", True): (_SentinelTlsConnection, _AsyncSentinelTlsConnection),
}
"""The classes of blocking and of asynchronous connections, by the kind of an address, and True behind Sentinels."""


def get_connection_class(address: BrokerAddress) -> Any:
    """Return the class of blocking connections to an address."""
    return _CONNECTIONS[address.kind, bool(address.sentinels)][0]


def make_client(address: BrokerAddress, **arguments: Any) -> redis.Redis:
    """Return a blocking client. ``arguments``: those of redis-py's connections."""
    pool = redis.ConnectionPool(get_connection_class(address), **address.connection_arguments, **arguments)
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
        connection_class=_CONNECTIONS[address.kind, bool(address.sentinels)][1],
        **address.connection_arguments,
        **arguments,
    )
    return aioredis.Redis.from_pool(pool)
