"""Connections to clients that wait for a job: event streams with keep-alives, and the handling of disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import structlog
from anyio import CancelScope
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.conversation.narration import JobEnd
from reasoner.jobs.events import Event
from workers.store.event_log import ShuttingDown
from workers.store.jobs import JobStore, NoSuchJob

KEEP_ALIVE_SECONDS = 15.0
COMMENT = ": keep-alive\n\n"
"""A comment, which clients do not see."""

log = structlog.get_logger("reasoner.api")


class ClientDisconnected(Exception):
    """The client closed its connection before the response began."""


class JobReader(Protocol):
    """A reader of a job's events. ``end`` is set once the job has ended."""

    @property
    def end(self) -> JobEnd | None: ...
    def add(self, event: Event) -> object:
        """Read the next event."""
        ...


async def wait_for_end(
    request: Request, store: JobStore, job_id: str, reader: JobReader, *, outlives_client: bool
) -> JobEnd | None:
    """Follow the job to its end and return it; None if the job was deleted.

    Raises ``ClientDisconnected`` if the client goes first. Its job is then cancelled, unless it ``outlives_client``.
    """
    follow = asyncio.ensure_future(_follow(store, job_id, reader))
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({follow, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not follow.done():
            raise ClientDisconnected
        follow.result()
        return reader.end
    finally:
        follow.cancel()
        disconnect.cancel()
        if not outlives_client:
            await cancel_abandoned_job(store, job_id, reader)


async def cancel_abandoned_job(store: JobStore, job_id: str, reader: JobReader) -> None:
    """Cancel a job whose client has gone, unless it has ended."""
    if reader.end is not None:
        return
    with CancelScope(shield=True):
        try:
            await store.cancel_abandoned(job_id)
        except NoSuchJob:
            log.info("a job that nobody waits for was deleted", job=job_id)
        except ShuttingDown:  # without a broker: the job goes on until its budget ends it
            log.warning("a job that nobody waits for runs on", job=job_id)


class EventStream(StreamingResponse):
    """Server-sent events with keep-alives. ``on_close`` is called when the stream is over, for whatever reason."""

    def __init__(
        self,
        events: AsyncIterator[str],
        on_close: Callable[[], Awaitable[None]] | None = None,
        *,
        keep_alive: str = COMMENT,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_add_keep_alives(events, keep_alive), headers=headers, media_type="text/event-stream")
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_close is not None:
                await self._on_close()


async def _add_keep_alives(events: AsyncIterator[str], keep_alive: str) -> AsyncIterator[str]:
    """Yield the events, and a keep-alive after each ``KEEP_ALIVE_SECONDS`` without one, so that no proxy times out."""
    next_event = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({next_event}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield keep_alive
                continue
            event = next_event.result()
            if event is None:
                return
            yield event
            next_event = asyncio.ensure_future(anext(events, None))
    finally:
        next_event.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({next_event})


async def _follow(store: JobStore, job_id: str, reader: JobReader) -> None:
    async for event in store.follow(job_id):
        reader.add(event)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
