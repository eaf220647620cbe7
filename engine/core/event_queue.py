"""Events from the engine's thread to event loops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.scheduler.sequence import Event

_log = logging.getLogger(__name__)


class EventQueue:
    """Events from one thread to queues of event loops, sent in one batch per step and loop.

    Batched because a wake-up of an event loop costs as much as a branch's share of a step."""

    def __init__(self) -> None:
        self._held: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Any], Event]]] = {}

    def create_callback(self, events: asyncio.Queue[Any]) -> Callable[[Event], None]:
        """Return a function of the sending thread that queues events for ``events``, of the running event loop."""
        loop = asyncio.get_running_loop()

        def hold(event: Event) -> None:
            self._held.setdefault(loop, []).append((events, event))

        return hold

    def send(self) -> None:
        """Send all queued events, in the order of each queue."""
        held, self._held = self._held, {}
        for loop, batch in held.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # nothing waits for the events of a closed loop
                _log.debug("the event loop of some answers is closed")


def _put(batch: list[tuple[asyncio.Queue[Any], Event]]) -> None:
    for events, event in batch:
        events.put_nowait(event)
