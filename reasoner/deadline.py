"""A job's deadline: running work is cut off then, and no further work is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")

SecondsLeft = Callable[[], float | None]
"""Seconds until running work is cut off, at least zero; ``None`` without a deadline (``Ledger.seconds_until_cut``)."""


def unlimited() -> float | None:
    """Return ``None``: there is no deadline."""
    return None


async def run_within(seconds: float | None, work: Callable[[], Awaitable[_T]]) -> _T | None:
    """Return the result of ``work()``, or ``None`` if it takes longer; without time left it is not started."""
    if seconds is not None and seconds <= 0:
        return None
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except TimeoutError:
        if not limit.expired():
            raise
        return None
