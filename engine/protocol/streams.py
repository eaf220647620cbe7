"""Merging of event streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from engine.protocol.types import Completion, Delta, Events

_QUEUE_SIZE = 64


def merge_streams(streams: Sequence[Events], width: int) -> Events:
    """Merge streams of ``width`` branches each. Branch indices of stream ``i`` are shifted by ``i * width``.

    Raises the first exception of a stream. An exception, and closing the merged stream, close all of them.
    """
    return streams[0] if len(streams) == 1 else _merge(streams, width)


async def _merge(streams: Sequence[Events], width: int) -> Events:
    events: asyncio.Queue[Completion | Delta | Exception | None] = asyncio.Queue(_QUEUE_SIZE)

    async def forward(stream: Events, offset: int) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for event in stream:
                    await events.put(replace(event, index=event.index + offset))
        except Exception as error:  # raised by the reader
            end = error
        await events.put(end)

    tasks = [asyncio.create_task(forward(stream, index * width)) for index, stream in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
