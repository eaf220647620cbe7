"""Interactive answers while a batch runs: time to the first token, alone, beside the batch, and beside one that yields.

The protocol is that of llm-d's batch gateway (llm-d/llm-d#491): a steady stream of interactive requests, a batch that
fits into its window, and the share of the batch that ended in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from api.roles.private_service import run_private_service
from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.process import BenchError, installed
from benchmarks.service.measure import TARGET, quantile
from reasoner.evaluation.suites.registry import load_problems
from reasoner.jobs.job import TERMINAL_STATUSES
from workers.config.settings import QueueName, Settings, load_settings

ALONE, UNPROTECTED, PROTECTED = "alone", "beside a batch", "beside a batch that yields"
WAYS = (ALONE, UNPROTECTED, PROTECTED)
FACTOR_TARGET, ENDED_TARGET = 1.3, 0.99
_CASE = "interactive beside a batch"
_BATCH_SLOTS = 8
_CALIBRATION_JOBS = 32
_WARM_UP = 8
_TIMEOUT = httpx.Timeout(120.0)


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """Settings of a run. The models are those of the environment, as for ``reasoner serve``."""

    window: float = 60.0
    """Seconds in which the batch is to end."""
    rate: float = 2.0
    """Interactive requests a second, at random times."""
    load: float = 0.6
    """The batch's size as a fraction of what the machine does in a window without interactive requests."""
    rounds: int = 1
    max_tokens: int = 32
    samples: int = 8
    settings: Settings = field(default_factory=load_settings)
    cases: tuple[str, ...] = WAYS


@dataclass(frozen=True, slots=True)
class _Window:
    """Measurements of one window. ``waits``: seconds to the first token. ``ended``: jobs of the batch that ended."""

    waits: Sequence[float]
    ended: int


def measure(plan: InterferencePlan, listener: Listener) -> Measured:
    """Run the plan. Raises ``BenchError`` if a request or a job fails."""
    measured = Measured(versions=installed(("celery", "httpx", "redis", "torch")))
    listener.total(1 + len(WAYS) * plan.rounds)
    waits: dict[str, list[float]] = {way: [] for way in WAYS}
    ended: dict[str, list[float]] = {way: [] for way in WAYS if way != ALONE}
    listener.step("how many jobs a window holds")
    size = _calibrate(plan)
    listener.say(f"{size} jobs in {plan.window:.0f} s, {plan.rate:g} interactive requests a second")
    for turn in range(plan.rounds):
        for way in WAYS:
            listener.step(f"{way}, round {turn + 1}/{plan.rounds}")
            window = _run_window(plan, way, 0 if way == ALONE else size, seed=turn)
            waits[way] += window.waits
            if way != ALONE:
                ended[way].append(window.ended / size)
    measured.runs |= {"seconds to the first token": waits, "share of the batch that ended": ended}
    _report(measured, waits, ended)
    return measured


def _report(measured: Measured, waits: dict[str, list[float]], ended: dict[str, list[float]]) -> None:
    for share in (0.5, 0.99):
        alone = 1000 * quantile(waits[ALONE], share)
        for way in (PROTECTED, UNPROTECTED):
            value = 1000 * quantile(waits[way], share)
            metric = f"time to first token p{100 * share:.0f}, {way}"
            measured.rows.append(Row(_CASE, metric, "ms", value, ALONE, alone, alone / value))
    for way, shares in ended.items():
        mean = sum(shares) / len(shares)
        metric = f"ended in the window, {way}"
        measured.rows.append(Row(_CASE, metric, "of the jobs", mean, TARGET, ENDED_TARGET, mean / ENDED_TARGET))


def _configure(plan: InterferencePlan, way: str) -> Settings:
    pools: dict[QueueName, int] = {"batch": _BATCH_SLOTS} if way == PROTECTED else {}
    return plan.settings.model_copy(update={"pools": pools})


def _write_job(plan: InterferencePlan, text: str, seed: int, way: str) -> dict[str, Any]:
    return {
        "problem": text,
        "strategy": {"name": "self_consistency", "n": plan.samples},
        "sampling": {"max_tokens": 128},
        "priority": "batch" if way == PROTECTED else "interactive",
        "seed": seed,
    }


def _write_batch(plan: InterferencePlan, size: int, way: str) -> dict[str, Any]:
    texts = [problem.text for problem in load_problems("countdown", limit=64)]
    jobs = [_write_job(plan, texts[index % len(texts)], index, way) for index in range(size)]
    return {"jobs": jobs, "budget": {"tokens": 4096 * size}}


def _calibrate(plan: InterferencePlan) -> int:
    """Return the number of jobs of a batch that takes the plan's share of a window."""
    with (
        run_private_service(_configure(plan, PROTECTED), Console(stderr=True, quiet=True)) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=_TIMEOUT) as client,
    ):
        for count in (4, _CALIBRATION_JOBS):  # the first warms up
            started = time.perf_counter()
            batch = client.post("/v1/batches", json=_write_batch(plan, count, PROTECTED)).raise_for_status().json()
            for job in batch["jobs"]:
                _await_end(client, job["id"])
            seconds = time.perf_counter() - started
    return max(1, round(plan.load * plan.window * _CALIBRATION_JOBS / seconds))


def _await_end(client: httpx.Client, job_id: str) -> None:
    while True:
        job = client.get(f"/v1/jobs/{job_id}", params={"wait": 60}).raise_for_status().json()
        if job["status"] in ("completed", "incomplete"):
            return
        if job["status"] in TERMINAL_STATUSES:
            raise BenchError(f"a job of the batch is {job['status']}: {job['error']}")


def _run_window(plan: InterferencePlan, way: str, size: int, seed: int) -> _Window:
    """Send interactive requests for a window, with a batch of ``size`` jobs, in a service of their own."""
    with run_private_service(_configure(plan, way), Console(stderr=True, quiet=True)) as url:
        return asyncio.run(_send(plan, url, way=way, size=size, seed=seed))


async def _send(plan: InterferencePlan, url: str, way: str, size: int, seed: int) -> _Window:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT) as client:
        for _ in range(_WARM_UP):
            await _ask(client, plan)
        batch_id = None
        if size:
            response = await client.post("/v1/batches", json=_write_batch(plan, size, way))
            batch_id = response.raise_for_status().json()["id"]
        begun, asking = time.perf_counter(), list[asyncio.Task[float]]()
        for at in _draw_arrivals(plan, seed):
            await asyncio.sleep(begun + at - time.perf_counter())
            asking.append(asyncio.create_task(_ask(client, plan)))
        await asyncio.sleep(begun + plan.window - time.perf_counter())
        ended = 0
        if batch_id is not None:
            batch = (await client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
            ended = sum(job["status"] in ("completed", "incomplete") for job in batch["jobs"])
        return _Window(await asyncio.gather(*asking), ended)


def _draw_arrivals(plan: InterferencePlan, seed: int) -> Iterator[float]:
    """Yield the times of interactive requests in a window, in seconds from its beginning."""
    times, at = random.Random(seed), 0.0
    while (at := at + times.expovariate(plan.rate)) < plan.window:
        yield at


async def _ask(client: httpx.AsyncClient, plan: InterferencePlan) -> float:
    """Return the seconds to the first token of a streamed answer, which is read to its end."""
    body = {
        "model": plan.settings.model_name,
        "messages": [{"role": "user", "content": "Make 24 out of 3, 5, 7 and 9."}],
        "max_completion_tokens": plan.max_tokens,
        "stream": True,
        "strategy": {"name": "greedy"},
    }
    started, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            raise BenchError(f"an interactive request was refused: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: {") and _has_text(json.loads(line.removeprefix("data: "))):
                first = time.perf_counter() - started
    if first is None:
        raise BenchError("an interactive request was answered without any text")
    return first


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(
        choice["delta"].get("content") or choice["delta"].get("reasoning_content") for choice in chunk["choices"]
    )
