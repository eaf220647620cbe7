"""The leases of all jobs that one process runs, renewed together by a thread that no busy event loop delays."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from workers.config.broker_address import parse_broker_url
from workers.store.broker_connections import make_client
from workers.store.broker_errors import BROKER_DOWN
from workers.store.claims import Claim, LeaseState, list_beats
from workers.store.jobs import JobStore
from workers.store.redis_client import read_scripts

HEARTBEATS_PER_LEASE = 6
"""More than the lease needs, since a heartbeat also detects a cancellation."""
HUNG_SECONDS = 60.0
"""An event loop that does nothing for so long counts as hung: other workers get its jobs."""
_TIMEOUT_SECONDS = 2.0
_CLAIMS_PER_SCRIPT = 100
"""Bounds the time for which one script keeps the broker from others."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldLease:
    """A lease that is renewed."""

    claim: Claim
    cancelled: asyncio.Event
    """Set when the client cancels the job."""
    lost: asyncio.Event
    """Set when another worker has the job, or it has ended."""


class Leases:
    """Renews the leases of one event loop's jobs by one script for many. Has a thread while there are any."""

    def __init__(self, store: JobStore, lease: float) -> None:
        """``lease``: the time in seconds after the last sign of life at which a worker counts as lost."""
        self._lease = lease
        self._url = store.url
        self._lock = threading.Lock()
        self._held: set[HeldLease] = set()
        self._ended: threading.Event | None = None
        """Ends the thread; ``None`` without one."""

    @contextmanager
    def keep(self, claim: Claim) -> Iterator[HeldLease]:
        """Renew the lease of a claim within the block."""
        held = HeldLease(claim, asyncio.Event(), asyncio.Event())
        with self._lock:
            self._held.add(held)
            if self._ended is None:
                self._ended = threading.Event()
                arguments = (self._ended, asyncio.get_running_loop())
                threading.Thread(target=self._renew, args=arguments, name="leases", daemon=True).start()
        try:
            yield held
        finally:
            with self._lock:
                self._held.discard(held)
                if not self._held and self._ended is not None:
                    self._ended.set()
                    self._ended = None

    def _renew(self, ended: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        seen = [time.monotonic()]
        address, timeouts = parse_broker_url(self._url), _TIMEOUT_SECONDS
        with make_client(
            address, decode_responses=True, socket_timeout=timeouts, socket_connect_timeout=timeouts
        ) as client:
            beat = client.register_script(read_scripts()["heartbeat"])
            while not ended.wait(self._lease / HEARTBEATS_PER_LEASE):
                _call(loop, lambda: seen.append(time.monotonic()))
                del seen[:-1]
                if time.monotonic() - seen[-1] > HUNG_SECONDS:
                    continue
                with self._lock:
                    held = [each for each in self._held if not each.lost.is_set()]
                for start in range(0, len(held), _CLAIMS_PER_SCRIPT):
                    some = held[start : start + _CLAIMS_PER_SCRIPT]
                    try:
                        states: list[LeaseState] = beat(args=list_beats([each.claim for each in some]))
                    except BROKER_DOWN:
                        break  # the searches fail by themselves when they cannot write
                    for each, state in zip(some, states, strict=True):
                        if state != "ok":
                            _call(loop, (each.lost if state == "lost" else each.cancelled).set)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
