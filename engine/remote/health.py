"""Health of engine replicas, shared by all clients of a process, so that each job need not find it out again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engine.protocol.types import EngineError, EngineUnavailable, ModelInfo

PROBE_INTERVAL_SECONDS = 2.0
"""The minimum time between two probes of a replica."""
REPORT_PROBE_INTERVAL_SECONDS = 0.25
"""The same for clients that report the health of replicas to others."""
PROBE_OVERDUE_SECONDS = 0.7
"""The time after which a replica with an unanswered probe is reported as away."""
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0
"""The time without requests to a replica after a failure: doubled with each further failure, up to the maximum."""

log = logging.getLogger("reasoner.engines")


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """Snapshot of the health of one replica."""

    name: str
    state: Literal["unknown", "up", "away"]
    models: tuple[ModelInfo, ...] = ()
    """The models of its last answer."""
    error: EngineError | None = None
    """The failure for which it counts as away."""


@dataclass(slots=True)
class _Record:
    models: tuple[ModelInfo, ...] | None = None
    error: EngineError | None = None
    """``None`` while the replica answers."""
    is_silent: bool = False
    num_failures: int = 0
    """The number since the last successful request. An answered probe does not reset it: the pauses of a replica that
    answers probes and fails every request grow, too."""
    probed_at: float = float("-inf")
    probing_since: float | None = None
    """``None`` while no probe is in flight."""
    paused_until: float = float("-inf")


class Health:
    """Health of replicas by name. Safe to use from several threads; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self.kinds: dict[str, str] = {}
        """Kinds of the servers by name (``engine.remote.http``); that of a replica is forgotten when it is away, since
        another server may come back."""

    def add(self, name: str) -> None:
        """Register a replica; one that is registered already keeps its state."""
        with self._lock:
            self._records.setdefault(name, _Record())

    def snapshot(self) -> list[ReplicaHealth]:
        """Return all replicas in the order in which they were added."""
        with self._lock:
            return [self._describe(name, record) for name, record in self._records.items()]

    def get_models(self, name: str) -> tuple[ModelInfo, ...] | None:
        """Return the models that a replica serves; ``None`` while it is away and before its first answer."""
        with self._lock:
            record = self._records[name]
            return record.models if record.error is None else None

    def is_unknown(self, name: str) -> bool:
        """Return True before the first answer and the first failure."""
        with self._lock:
            return self._records[name].models is None and self._records[name].error is None

    def is_silent(self, name: str) -> bool:
        """Return True if the last probe timed out: requests in flight may never be answered."""
        with self._lock:
            return self._records[name].is_silent

    def claim_probe(self, name: str, interval: float | None = None) -> bool:
        """Return True if a probe is due; the caller must then send it.

        ``interval``: seconds between probes, by default ``PROBE_INTERVAL_SECONDS``.
        """
        with self._lock:
            record, now = self._records[name], self._clock()
            paused_until = float("-inf") if record.error is None else record.paused_until
            if now < max(paused_until, record.probed_at + (PROBE_INTERVAL_SECONDS if interval is None else interval)):
                return False
            record.probed_at = now
            return True

    def record_probe_started(self, name: str) -> None:
        with self._lock:
            record = self._records[name]
            record.probing_since = self._clock() if record.probing_since is None else record.probing_since

    def record_probe_ended(self, name: str) -> None:
        with self._lock:
            self._records[name].probing_since = None

    def record_models(self, name: str, models: Sequence[ModelInfo]) -> None:
        """Record the answer to a probe."""
        with self._lock:
            record = self._records[name]
            if record.error is not None:
                log.info("engine %s answers again", name)
            record.models, record.error, record.is_silent = tuple(models), None, False
            record.probed_at = self._clock()

    def record_success(self, name: str) -> None:
        with self._lock:
            self._records[name].num_failures = 0
            self._counts[name, "requests"] += 1

    def record_failure(self, name: str, error: EngineError) -> None:
        """Record a failed request. Further failures while the replica is away do not make its pause longer."""
        with self._lock:
            self._counts[name, "failures"] += 1
            if self._records[name].error is None:
                self._mark_away(name, error)

    def record_probe_failure(self, name: str, error: EngineError, *, is_silent: bool) -> None:
        """Record a failed probe; ``is_silent`` if it timed out."""
        with self._lock:
            self._records[name].is_silent = is_silent
            self._mark_away(name, error)

    def take_counts(self) -> dict[tuple[str, str], int]:
        """Return the numbers of successful ``requests`` and of ``failures`` by replica since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return dict(counts)

    def _mark_away(self, name: str, error: EngineError) -> None:
        record = self._records[name]
        if record.error is None:
            log.warning("engine %s is away: %s", name, error)
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(record.num_failures, 16))
        self.kinds.pop(name, None)
        record.error = error
        record.num_failures += 1
        record.paused_until = self._clock() + pause

    def _describe(self, name: str, record: _Record) -> ReplicaHealth:
        models, error = record.models or (), record.error
        since = record.probing_since
        if error is None and since is not None and self._clock() - since >= PROBE_OVERDUE_SECONDS:
            error = EngineUnavailable(f"the engine at {name} has not answered for {PROBE_OVERDUE_SECONDS:g} s")
        if error is not None:
            return ReplicaHealth(name, "away", models, error)
        return ReplicaHealth(name, "unknown" if record.models is None else "up", models)


@lru_cache(256)
def warn_once(message: str) -> None:
    """Log each message once, since every job of a service meets the same state."""
    log.warning(message)
