"""A client and the job that it waits for: what keeps the connection alive, and what happens when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from anyio import CancelScope
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.openai.narration import End, Narration
from workers.store.jobs import BROKER_DOWN, JobStore, NoSuchJob

KEEP_ALIVE_SECONDS = 15.0

log = structlog.get_logger("reasoner.api")


class ClientDisconnected(Exception):
    """Nobody is there to read an answer."""


async def ended(request: Request, store: JobStore, job_id: str, story: Narration, *, returns: bool) -> End | None:
    """Follow the job to its end."""
    following = asyncio.ensure_future(_listen(store, job_id, story))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            raise ClientDisconnected
        following.result()
        return story.end
    finally:
        following.cancel()
        leaving.cancel()
        if not returns:
            await cancel_abandoned_job(store, job_id, story)


async def cancel_abandoned_job(store: JobStore, job_id: str, story: Narration) -> None:
    """Cancels a job that nobody waits for any longer, unless it has ended."""
    if story.end is not None:
        return
    with CancelScope(shield=True):
        try:
            await store.cancel(job_id)
        except NoSuchJob:
            log.info("a job that nobody waits for was deleted", job=job_id)
        except BROKER_DOWN as error:  # its budget ends it
            log.warning("a job that nobody waits for runs on", job=job_id, reason=type(error).__name__)


class EventStream(StreamingResponse):
    """Server-sent events that stay alive through a silence. ``leave`` is called when the stream is over, whoever ended
    it."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], Awaitable[None]] | None = None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_keep_alive(events), headers=headers, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._leave is not None:
                await self._leave()


async def _keep_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and now and then a comment while there are none, so that nobody takes the connection for dead."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield ": keep-alive\n\n"
                continue
            event = waiting.result()
            if event is None:
                return
            yield event
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({waiting})


async def _listen(store: JobStore, job_id: str, story: Narration) -> None:
    async for event in store.follow(job_id):
        story.take(event)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
