"""What the engine's thread tells event loops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.scheduler.sequence import Event

_log = logging.getLogger(__name__)


class EventQueue:
    """Events on their way from one thread to queues of event loops. All that a step has for a loop goes at once: to
    wake it costs as much as a branch's part of a step."""

    def __init__(self) -> None:
        self._held: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Event], Event]]] = {}

    def sink(self, events: asyncio.Queue[Event]) -> Callable[[Event], None]:
        """Takes what is meant for a queue of the running event loop. To be called by the thread that sends."""
        loop = asyncio.get_running_loop()

        def hold(event: Event) -> None:
            self._held.setdefault(loop, []).append((events, event))

        return hold

    def send(self) -> None:
        """Lets go of all that was taken, each queue's in its order."""
        if not self._held:
            return
        held, self._held = self._held, {}
        for loop, some in held.items():
            try:
                loop.call_soon_threadsafe(_put, some)
            except RuntimeError:
                # The loop was closed, and whoever waited on it is gone.
                _log.debug("answers found their event loop closed")


def _put(some: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for events, event in some:
        events.put_nowait(event)
