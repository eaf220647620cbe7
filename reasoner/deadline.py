"""A job's deadline: what still runs then is cut, and nothing that takes time is begun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")

SecondsLeft = Callable[[], float | None]
"""Seconds until running work is cut off, at least zero; ``None`` without a deadline (``Ledger.seconds_until_cut``)."""


def unlimited() -> float | None:
    """Return the time left of what has no deadline."""
    return None


async def run_within(seconds: float | None, work: Callable[[], Awaitable[_T]]) -> _T | None:
    """Return what ``work()`` answers, or ``None`` when the time is up before; without time left it is not begun."""
    if seconds is not None and seconds <= 0:
        return None
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except TimeoutError:
        if not limit.expired():
            raise
        return None
