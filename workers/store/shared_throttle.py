"""Limits on the rate of requests to a server, shared by all workers."""

from __future__ import annotations

import uuid

from engine.remote.throttle import RateLimits
from workers.store.redis_client import RedisClient

_LIFETIME_MS = 900_000
"""The time after which a request of a process that died counts as closed: longer than the timeouts of any."""


class SharedThrottle:
    """``Throttle`` of the requests that all processes on one broker send to the server ``name``."""

    def __init__(self, redis: RedisClient, name: str, limits: RateLimits) -> None:
        self._redis = redis
        self._name = name
        self._limits = limits

    async def try_reserve(self, tokens: int) -> tuple[str, float]:
        ticket, limits = uuid.uuid4().hex, self._limits
        numbers = (limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrency or 0)
        wait = await self._redis.script("rate_reserve", self._name, ticket, *numbers, tokens, _LIFETIME_MS)
        return ("", int(wait) / 1000) if int(wait) else (ticket, 0.0)

    async def settle(self, ticket: str, generated: int) -> None:
        await self._redis.script("rate_settle", self._name, ticket, generated, 0)

    async def pause(self, seconds: float) -> None:
        await self._redis.script("rate_settle", self._name, "", 0, round(1000 * seconds))
