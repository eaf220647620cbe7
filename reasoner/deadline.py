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


async def run_unless(stopped: asyncio.Event, work: Callable[[], Awaitable[_T]]) -> _T | None:
    """Return the result of ``work()``, or ``None`` if the event is set first; the work is then cancelled."""
    if stopped.is_set():
        return None
    task = asyncio.ensure_future(work())
    waiter = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
