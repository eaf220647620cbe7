"""The event loop on which a worker process runs all of its jobs, and a watchdog that tells where it is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import structlog

from workers.store.broker_errors import BROKER_DOWN, describe_outage

Handler = Callable[[str], Coroutine[Any, Any, None]]
"""Handles the wake-up of the job with this id."""
OpenHandlers = Callable[[asyncio.Event], AbstractAsyncContextManager[Mapping[str, Handler]]]
"""Opens what the jobs of a process share, and returns the handlers by the names of Celery's tasks. Its argument is set
when the worker shuts down."""

BLOCKED_SECONDS: Final = 1.0
"""A loop that runs nothing for so long is reported: heartbeats of all jobs wait for it."""
_TICK_SECONDS: Final = 0.25
_SHOWN_FRAMES: Final = 6

log = structlog.get_logger("reasoner.worker")


class JobLoop:
    """An event loop in a thread, beside the one in which Celery receives messages and signals."""

    def __init__(self, open_handlers: OpenHandlers) -> None:
        self._open_handlers = open_handlers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._shutting_down = asyncio.Event()
        self._stopped = asyncio.Event()
        self._handlers: Mapping[str, Handler] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._ticked_at = time.monotonic()

    def start(self) -> None:
        """Start the thread and open what jobs share. Raises what opening raises."""
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure
        threading.Thread(target=self._watch, name="job watchdog", daemon=True).start()

    def submit(self, name: str, job_id: str, done: Callable[[], object]) -> None:
        """Begin to handle a wake-up; ``done`` is called in the loop's thread at its end. Safe from any thread."""
        self._loop.call_soon_threadsafe(self._begin, name, job_id, done)

    def shut_down(self) -> None:
        """Let all jobs hand themselves back, and begin no others. Safe in a signal handler."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: all jobs have ended
            self._loop.call_soon_threadsafe(self._shutting_down.set)

    def stop(self) -> None:
        """Wait until all jobs have ended, and close what they share."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _begin(self, name: str, job_id: str, done: Callable[[], object]) -> None:
        task = self._loop.create_task(self._handle(name, job_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: done())

    async def _handle(self, name: str, job_id: str) -> None:
        if self._shutting_down.is_set():
            return  # the reaper sends the wake-up again
        try:
            await self._handlers[name](job_id)
        except BROKER_DOWN as error:
            log.error("broker lost: the wake-up is sent again", job=job_id, error=describe_outage(error))
        except Exception:
            log.exception("a wake-up failed", job=job_id, task=name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._opened.set()
            self._loop.close()

    async def _serve(self) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            async with self._open_handlers(self._shutting_down) as self._handlers:
                self._opened.set()
                await self._stopped.wait()
                while self._running:
                    await asyncio.wait(self._running)
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})

    async def _tick(self) -> None:
        while True:
            self._ticked_at = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)

    def _watch(self) -> None:
        """Report once, with the place in the code, each time that the loop is blocked."""
        reported = 0.0
        while self._thread.is_alive():
            self._thread.join(BLOCKED_SECONDS / 2)
            ticked_at = self._ticked_at
            blocked = time.monotonic() - ticked_at - _TICK_SECONDS
            if blocked < BLOCKED_SECONDS or ticked_at == reported:
                continue
            reported = ticked_at
            frame = sys._current_frames().get(self._thread.ident or 0)
            if frame is not None:
                place = "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])
                log.warning("event loop blocked", seconds=round(blocked, 1), num_jobs=len(self._running), place=place)
