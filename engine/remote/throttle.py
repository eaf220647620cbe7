"""Limits on the rate of requests to a server that counts them, such as a hosted one."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from engine.protocol.wire import Json

WINDOW_SECONDS = 60
FULL_WAIT_SECONDS = 0.05
"""The wait while as many requests are open as may be."""
_MAX_SLEEP_SECONDS = 1.0
"""Limits and pauses may end before they were expected to."""
_BYTES_PER_TOKEN = 4
_PROMPTS = ("prompt", "messages", "input")
"""Fields of completions, conversations, and sequences to pool."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of one server; ``None`` is no limit. Requests and tokens are those of any 60 seconds."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Throttle(Protocol):
    """The requests to one server, those of everybody who shares its limits."""

    async def try_reserve(self, tokens: int) -> tuple[str, float]:
        """Return a ticket for a request whose prompt has ``tokens``, or else an empty one and the seconds to wait."""
        ...

    async def settle(self, ticket: str, generated: int) -> None:
        """Return a ticket, and count the tokens that were generated."""
        ...

    async def pause(self, seconds: float) -> None:
        """Send nothing for so long, since the server has refused a request."""
        ...


class Use:
    """The tokens of one request."""

    def __init__(self) -> None:
        self.generated = 0

    def read(self, answer: Json) -> None:
        """Read what an answer, or an event of one, reports."""
        usage = answer.get("usage")
        if isinstance(usage, dict) and isinstance(generated := usage.get("completion_tokens"), int):
            self.generated = generated or self.generated


@asynccontextmanager
async def admitted(throttle: Throttle | None, path: str, body: Json | None) -> AsyncIterator[Use]:
    """Wait until the request may be sent, and count what it takes. Only those that the model computes are counted."""
    use = Use()
    prompt = None
    if body is not None and path != "/tokenize":
        prompt = next((body[name] for name in _PROMPTS if name in body), None)
    if throttle is None or prompt is None:
        yield use
        return
    size = (
        len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else len(str(prompt)) // _BYTES_PER_TOKEN
    )
    while True:
        ticket, wait = await throttle.try_reserve(size)
        if ticket:
            break
        await asyncio.sleep(min(wait, _MAX_SLEEP_SECONDS))
    try:
        yield use
    finally:
        await throttle.settle(ticket, use.generated)


class LocalThrottle:
    """The requests of this process, on one event loop."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._requests: defaultdict[int, int] = defaultdict(int)
        self._tokens: defaultdict[int, int] = defaultdict(int)
        """By the second in which they were sent."""
        self._open: set[str] = set()
        self._paused_until = 0.0
        self._count = 0

    async def try_reserve(self, tokens: int) -> tuple[str, float]:
        now = time.time()
        if now < self._paused_until:
            return "", self._paused_until - now
        if self._limits.concurrency is not None and len(self._open) >= self._limits.concurrency:
            return "", FULL_WAIT_SECONDS
        free_at = max(
            _find_room(self._requests, 1, self._limits.requests_per_minute, int(now)),
            _find_room(self._tokens, tokens, self._limits.tokens_per_minute, int(now)),
        )
        if free_at:
            return "", free_at - now
        self._requests[int(now)] += 1
        self._tokens[int(now)] += tokens
        self._count += 1
        self._open.add(ticket := str(self._count))
        return ticket, 0.0

    async def settle(self, ticket: str, generated: int) -> None:
        self._open.discard(ticket)
        self._tokens[int(time.time())] += generated

    async def pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, time.time() + seconds)


def _find_room(used: dict[int, int], more: int, limit: int | None, second: int) -> int:
    """Return 0 if ``more`` fits into the window that ends with ``second``, or else the second in which it will.

    What exceeds the limit by itself fits into an empty window, so that the server can say what it thinks of it.
    """
    for old in [old for old in used if old < second - WINDOW_SECONDS]:
        del used[old]
    total = sum(used.values())
    free_at = 0
    for old in sorted(used):
        if limit is None or total == 0 or total + more <= limit:
            break
        total -= used[old]
        free_at = old + WINDOW_SECONDS + 1  # it may have been sent at the end of its second
    return free_at
