"""``python -m benchmarks.shared_cores``: seconds for the README's question on an idle machine, beside a process that
uses a core all the time, and under a quota of one CPU.

Two services take turns: this one, and one with as many threads as cores that spin while they wait, OpenMP's default.
The budget is the README's 4,000 tokens without its 20 seconds, so that every answer is the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from api.roles.supervisor import free_port
from benchmarks.engine.measure import Measured, Row
from benchmarks.engine.report import machine
from engine.threads.processors import find_processors
from reasoner.client import Client
from workers.processes.children import read_tail, stop

QUESTION: dict[str, Any] = {
    "problem": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 24.",
    "strategy": {"name": "beam", "n": 16},
    "budget": {"tokens": 4000},
}
OURS, PEER = "ours", "threads that spin"
LIBGOMP_SPINS = 300_000
"""Default of GNU's OpenMP."""
SITUATIONS = ("alone", "beside a busy core", "one CPU")
_START_SECONDS = 600.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2


class BenchError(Exception):
    """A service did not start, or a case cannot be set up on this machine."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, and the seconds that its answers took."""

    name: str
    url: str
    seconds: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table or the document. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_cores", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="times that the question is asked (%(default)s)")
    parser.add_argument("--situation", action="append", choices=SITUATIONS, help="repeatable; default: all")
    parser.add_argument("--spins", type=int, help="rounds that our threads spin, in place of the service's own")
    parser.add_argument("--threads", type=int, help="our threads, in place of the service's own choice")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    asked = parser.parse_args(argv)
    wished = {"GOMP_SPINCOUNT": asked.spins, "REASONER_ENGINE_THREADS": asked.threads}
    ours = {name: str(value) for name, value in wished.items() if value is not None}
    spinning = {
        "GOMP_SPINCOUNT": str(LIBGOMP_SPINS),
        "REASONER_ENGINE_THREADS": str(find_processors().allowed),
    }
    rows, runs = [], []
    try:
        for situation in asked.situation or SITUATIONS:
            case, found = _measure(situation, {OURS: ours, PEER: spinning}, asked.rounds)
            for what, pick in (("median", statistics.median), ("shortest", min), ("longest", max)):
                mine, peer = (pick(found[name]) for name in (OURS, PEER))
                rows.append(Row(case, f"seconds of the question, {what}", "s", mine, PEER, peer, peer / mine))
            runs.append({"case": case, **found})
    except BenchError as error:
        print(f"benchmarks.shared_cores: {error}", file=sys.stderr)
        return 1
    if asked.json:
        about = machine(find_processors().threads, Measured())
        print(json.dumps({"machine": about, "rows": [asdict(row) for row in rows], "runs": runs}, indent=2))
        return 0
    view = Table("case", "metric", "ours", PEER, "ratio")
    for row in rows:
        view.add_row(row.case, row.metric, f"{row.ours:.2f}", f"{row.peer_value:.2f}", f"{row.ratio:.2f}")
    Console().print(view)
    return 0


def _measure(situation: str, systems: dict[str, dict[str, str]], rounds: int) -> tuple[str, dict[str, list[float]]]:
    """Return the name of the case as it was set up, and the seconds of each system."""
    with contextlib.ExitStack() as running:
        case, launch = situation, list[str]()
        if situation == "one CPU":
            case, launch = running.enter_context(_one_cpu())
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-")))
        services = [
            running.enter_context(_service(name, launch, environ, folder / f"service{place}"))
            for place, (name, environ) in enumerate(systems.items())
        ]
        for service in services:
            _ask(service, seed=0)  # warm up what is computed once per service
            service.seconds.clear()
        if situation == "beside a busy core":
            running.enter_context(_busy())
        for seed in range(1, rounds + 1):
            for service in services if seed % 2 else reversed(services):
                _ask(service, seed)
                print(f"{case}: {service.name}: {service.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return case, {service.name: service.seconds for service in services}


def _ask(service: Service, seed: int) -> None:
    with Client(service.url) as client:
        begun = time.perf_counter()
        job = client.wait(client.submit(QUESTION | {"seed": seed}).id)
        service.seconds.append(time.perf_counter() - begun)
    if job.status != "completed":
        raise BenchError(f"the job of {service.name} ended as {job.status}: {job.error}")


@contextlib.contextmanager
def _service(name: str, launch: Sequence[str], environ: dict[str, str], folder: Path) -> Iterator[Service]:
    """Yield ``reasoner serve`` with nothing configured but ``environ``."""
    folder.mkdir()
    port, log = free_port(), folder / "log"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("REASONER_", "OMP_", "GOMP_"))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launch, sys.executable, "-m", "api.cli.main", "serve", "--port", str(port)],
            env=kept | {"REASONER_DATA_DIR": str(folder / "data"), **environ},
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(lambda: httpx.get(f"{url}/readyz", trust_env=False, timeout=5.0).is_success, process, log)
        yield Service(name, url)
    finally:
        stop(process, grace=_STOP_SECONDS)


def _await(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise BenchError(f"the service did not start:\n{read_tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if ready():
                return
        time.sleep(_POLL_SECONDS)
    raise BenchError(f"the service was not ready after {_START_SECONDS:g} s:\n{read_tail(log)}")


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        stop(process, grace=_STOP_SECONDS)


@contextlib.contextmanager
def _one_cpu() -> Iterator[tuple[str, list[str]]]:
    """Yield a case's name and the command prefix that runs a process in a control group with a quota of one CPU. Where
    no group can be created, the process runs on one core instead.
    """
    for root, files in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}),
        ("/sys/fs/cgroup/cpu,cpuacct", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}),
        ("/sys/fs/cgroup", {"cpu.max": "100000 100000"}),
    ):
        group = Path(root) / f"reasoner-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, value in files.items():
                (group / name).write_text(value)
        except OSError:  # the controller is not available
            group.rmdir()
            continue
        try:
            yield "quota of one CPU", ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
        finally:
            _remove(group)
        return
    yield "one core (no quota can be set here)", ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def _remove(group: Path) -> None:
    """Remove the group once its last process has ended."""
    until = time.monotonic() + _STOP_SECONDS
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
