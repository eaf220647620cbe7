"""Which engines answer, as all clients of one process know it: a job does not find out again what another one found."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.protocol.types import EngineError, EngineUnavailable, ModelInfo

FRESH_SECONDS = 2.0
"""An engine is asked how it is no more often than this."""
MOMENT_SECONDS = 0.25
"""The same where somebody wants to know how it is now."""
ANSWER_SECONDS = 0.7
"""An engine that was asked how it is and has not answered for so long is not up to those who want to know."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
"""Seconds that an engine is left alone after its first failure, doubled with each further one, and at most."""

log = logging.getLogger("reasoner.engines")


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """What is known of one engine."""

    name: str
    state: Literal["unknown", "up", "away"]
    models: tuple[ModelInfo, ...] = ()
    """What it serves, or served when it was last heard of."""
    error: EngineError | None = None
    """Why it is away."""


@dataclass(slots=True)
class _Record:
    models: tuple[ModelInfo, ...] | None = None
    error: EngineError | None = None
    """``None`` while it answers."""
    silent: bool = False
    failures: int = 0
    """Since a request last succeeded: one that says it is well and fails every request is left alone longer, too."""
    asked_at: float = float("-inf")
    asking_since: float | None = None
    """``None`` while nobody waits for it to say how it is."""
    away_until: float = float("-inf")


class Health:
    """May be used from any thread. ``clock`` answers seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str) -> None:
        """An engine that nothing is known of; a known one stays as it is."""
        with self._lock:
            self._records.setdefault(name, _Record())

    def snapshot(self) -> list[ReplicaHealth]:
        """All engines, in the order in which they were added."""
        with self._lock:
            return [self._standing(name, record) for name, record in self._records.items()]

    def up(self, name: str) -> tuple[ModelInfo, ...] | None:
        """What it serves; ``None`` while it is away and before it was first heard of."""
        with self._lock:
            record = self._records[name]
            return record.models if record.error is None else None

    def new(self, name: str) -> bool:
        """Whether nothing is known of it yet."""
        with self._lock:
            return self._records[name].models is None and self._records[name].error is None

    def silent(self, name: str) -> bool:
        """Whether it took too long to say how it is: whatever it was asked may never be answered."""
        with self._lock:
            return self._records[name].silent

    def due(self, name: str, fresh: float | None = None) -> bool:
        """Return true if it is time to ask it how it is, which the caller is then to do.

        Its answer of ``fresh`` seconds ago still holds.
        """
        with self._lock:
            record, now = self._records[name], self._clock()
            alone_until = float("-inf") if record.error is None else record.away_until
            if now < max(alone_until, record.asked_at + (FRESH_SECONDS if fresh is None else fresh)):
                return False
            record.asked_at = now
            return True

    def asking(self, name: str) -> None:
        """It is being asked how it is."""
        with self._lock:
            record = self._records[name]
            record.asking_since = self._clock() if record.asking_since is None else record.asking_since

    def asked(self, name: str) -> None:
        """It has said how it is, or nobody waits for that any longer."""
        with self._lock:
            self._records[name].asking_since = None

    def answered(self, name: str, models: Sequence[ModelInfo]) -> None:
        """It said what it serves."""
        with self._lock:
            record = self._records[name]
            if record.error is not None:
                log.info("engine %s answers again", name)
            record.models, record.error, record.silent = tuple(models), None, False
            record.asked_at = self._clock()

    def worked(self, name: str) -> None:
        """A request succeeded."""
        with self._lock:
            self._records[name].failures = 0
            self._counts[name, "requests"] += 1

    def failed(self, name: str, error: EngineError) -> None:
        """A request failed. The others that fail with it tell nothing new."""
        with self._lock:
            self._counts[name, "failures"] += 1
            if self._records[name].error is None:
                self._leave(name, error)

    def unwell(self, name: str, error: EngineError, *, silent: bool) -> None:
        """It did not say how it is: ``silent`` if it said nothing at all."""
        with self._lock:
            self._records[name].silent = silent
            self._leave(name, error)

    def take_counts(self) -> dict[tuple[str, str], int]:
        """How many ``requests`` succeeded and how many ``failures`` there were, by engine, since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return dict(counts)

    def _leave(self, name: str, error: EngineError) -> None:
        """Leaves it alone for a while."""
        record = self._records[name]
        if record.error is None:
            log.warning("engine %s is away: %s", name, error)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(record.failures, 16))
        record.error = error
        record.failures += 1
        record.away_until = self._clock() + pause

    def _standing(self, name: str, record: _Record) -> ReplicaHealth:
        models, error = record.models or (), record.error
        since = record.asking_since
        if error is None and since is not None and self._clock() - since >= ANSWER_SECONDS:
            error = EngineUnavailable(f"the engine at {name} has not answered for {ANSWER_SECONDS:g} s")
        if error is not None:
            return ReplicaHealth(name, "away", models, error)
        return ReplicaHealth(name, "unknown" if record.models is None else "up", models)
