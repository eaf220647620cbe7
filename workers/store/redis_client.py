"""Connections to Redis for one event loop: single commands, the Lua scripts of ``lua/``, and blocking reads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff

from workers.config.broker_address import parse_broker_url
from workers.store.broker_connections import make_async_client
from workers.store.broker_errors import WRITE_PROBE

BLOCK_SECONDS = 5.0
"""The longest time that one blocking read waits."""

_LUA = Path(__file__).parent / "lua"
_SCRIPTS = tuple(sorted(path.stem for path in _LUA.glob("*.lua") if path.stem != "common"))
_MAX_CONNECTIONS = 128
"""More jobs than that take turns: a command takes a millisecond."""
_MAX_BLOCKING = 1000
"""Each client that follows a job holds one."""


class RedisClient:
    """One event loop's connections to the store."""

    def __init__(self, url: str, *, retry_seconds: float = 0.0) -> None:
        """Create the connection pools without connecting.

        ``retry_seconds``: how long a call keeps trying while the broker is away. An API uses 0, since it answers 503
        and recovers by itself; a worker uses more, since its work would be lost.
        """
        self.url = url
        num_retries = round(retry_seconds)
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), num_retries) if num_retries else Retry(NoBackoff(), 0)
        self._redis = _connect(url, 5.0 if num_retries else 0.8, retry, _MAX_CONNECTIONS)
        # Blocking reads answer late by design and must not share the short timeout of the others.
        self._blocking = _connect(url, BLOCK_SECONDS + 5, Retry(NoBackoff(), 0), _MAX_BLOCKING)
        self._scripts = {name: self._redis.register_script(text) for name, text in read_scripts().items()}

    async def close(self) -> None:
        await self._redis.aclose()
        await self._blocking.aclose()

    async def check_broker(self) -> None:
        """Raise one of ``BROKER_DOWN`` if the broker does not answer, or cannot write."""
        await self.command(*WRITE_PROBE)

    async def command(self, *command: str | int) -> Any:
        """Run one Redis command."""
        return await _run_to_end(self._redis.execute_command(*command))  # type: ignore[no-untyped-call]

    async def script(self, script: str, *arguments: str | int) -> Any:
        """Run one of the scripts in ``workers/store/lua``."""
        return await _run_to_end(self._scripts[script](args=arguments))

    async def list_ids(self, index: str, after: str | None, limit: int) -> list[str] | None:
        """Return ids of a sorted set from the highest, beginning behind ``after``; ``None`` if that is not in it."""
        highest: str = "+inf"
        if after is not None:
            score = await self.command("ZSCORE", index, after)
            if score is None:
                return None
            highest = f"({score:.0f}"
        ids: list[str] = await self.command("ZREVRANGEBYSCORE", index, highest, "-inf", "LIMIT", 0, limit)
        return ids

    def start_blocking(self, *command: str | int) -> asyncio.Future[Any]:
        """Start a blocking command. Do not cancel it, for the reason given at ``_run_to_end``: it ends by itself."""
        running = asyncio.ensure_future(self._blocking.execute_command(*command))  # type: ignore[no-untyped-call]
        running.add_done_callback(_retrieve_exception)
        return running


async def _run_to_end(operation: Coroutine[Any, Any, Any]) -> Any:
    """Await a command to its end even when the caller is cancelled; only then let the cancellation go on.

    A command that is cut off costs its connection. Worse, redis-py writes under ``asyncio.wait_for``, which in Python
    3.11 can swallow a cancellation (cpython #86296): a task that should have ended would go on for ever.
    """
    running = asyncio.ensure_future(operation)
    running.add_done_callback(_retrieve_exception)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _retrieve_exception(done: asyncio.Future[Any]) -> None:
    """Keep the event loop from logging an exception whose caller was cancelled."""
    if not done.cancelled():
        done.exception()


@functools.cache
def read_scripts() -> dict[str, str]:
    """Return the scripts by name."""
    common = (_LUA / "common.lua").read_text()
    return {name: common + (_LUA / f"{name}.lua").read_text() for name in _SCRIPTS}


def _connect(url: str, timeout: float, retry: Retry, max_connections: int) -> Redis:
    return make_async_client(
        parse_broker_url(url),
        max_connections=max_connections,
        wait_seconds=timeout,
        decode_responses=True,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=retry,
    )
