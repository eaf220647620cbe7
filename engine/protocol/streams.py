"""Several streams of a request as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine.protocol.types import Completion, Delta

Events = AsyncGenerator[Completion | Delta, None]

_WAITING = 64
"""Events that may wait for whoever reads."""


def merge_streams(streams: Sequence[Events], width: int) -> Events:
    """The events of the streams as they come; the indices of the second go on after the ``width`` of the first.

    Raises the first error of a stream. Closing it, or an error, closes all.
    """
    return streams[0] if len(streams) == 1 else _merge(streams, width)


async def _merge(streams: Sequence[Events], width: int) -> Events:
    events: asyncio.Queue[Completion | Delta | Exception | None] = asyncio.Queue(_WAITING)

    async def follow(stream: Events, offset: int) -> None:
        last: Exception | None = None
        try:
            async with aclosing(stream):
                async for event in stream:
                    await events.put(replace(event, index=event.index + offset))
        except Exception as error:  # whoever reads gets it
            last = error
        await events.put(last)

    tasks = [asyncio.create_task(follow(stream, place * width)) for place, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
