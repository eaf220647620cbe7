"""Events from the engine's thread to event loops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.scheduler.sequence import Event

_log = logging.getLogger(__name__)


class EventQueue:
    """Events from one thread to queues of event loops, sent in one batch per step and loop.

    Batched because a wake-up of an event loop costs as much as a branch's share of a step."""

    def __init__(self) -> None:
        self._held: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]] = {}

    def sink(self, events: asyncio.Queue[Event]) -> Callable[[Event], None]:
        """Return a function that queues events for ``events``, a queue of the running event loop.

        The function must be called by the sending thread only."""
        loop = asyncio.get_running_loop()

        def hold(event: Event) -> None:
            self._held.setdefault(loop, []).append((events, event))

        return hold

    def send(self) -> None:
        """Send all queued events, in the order of each queue."""
        if not self._held:
            return
        held, self._held = self._held, {}
        for loop, some in held.items():
            try:
                loop.call_soon_threadsafe(_put, some)
            except RuntimeError:
                # The loop was closed, so nothing waits for its events any more.
                _log.debug("answers found their event loop closed")


def _put(some: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for events, event in some:
        events.put_nowait(event)
