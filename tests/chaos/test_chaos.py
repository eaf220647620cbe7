"""Fifty jobs while processes of every role are killed at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import processes
from tests.chaos.fleet import NULL_ENGINE, Client, Fleet, Role, alone, check, until
from tests.seeds import shift

JOBS = 50
STRATEGIES: list[dict[str, Any]] = [
    {"name": "greedy"},
    {"name": "self_consistency", "n": 6},
    {"name": "best_of_n", "n": 4},
    {"name": "weighted_vote", "n": 5},
    {"name": "beam", "n": 4, "expansions": 2},
    {"name": "dvts", "n": 4},
    {"name": "rebase", "n": 6},
    {"name": "mcts", "n": 6},
    {"name": "particle", "n": 4},
    {"name": "best_first", "n": 4},
]
ROUNDS: list[tuple[Role, ...]] = [
    ("worker",),
    ("api",),
    ("engine",),
    ("broker",),
    ("worker", "broker"),
    ("worker", "engine"),
    ("api", "worker"),
    ("worker", "api", "engine", "broker"),
]
"""The roles killed together in each round."""

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def spec(number: int) -> dict[str, Any]:
    return {
        "problem": f"Question {number}?",
        "strategy": STRATEGIES[number % len(STRATEGIES)],
        "budget": {"tokens": 100_000},
        "seed": number,
        "deterministic": True,
        "priority": ("interactive", "batch")[number % 2],
    }


async def life(
    client: Client, number: int, round_begins: asyncio.Event, delay: float
) -> tuple[str, list[dict[str, Any]]]:
    """Run one client: submit a job when its time comes, and follow it to the end."""
    await round_begins.wait()
    await asyncio.sleep(delay)
    job_id = await client.submit(spec(number), key=f"job {number}")
    return job_id, await client.follow(job_id)


async def wreak(fleet: Fleet, rounds: list[asyncio.Event], rng: random.Random) -> None:
    """Kill processes at random moments, each time waiting until every running job has continued."""
    for round_begins, victims in zip(rounds, rng.sample(ROUNDS, len(ROUNDS)), strict=True):
        round_begins.set()
        await until(lambda: bool(fleet.running()), "a job runs")
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        running = fleet.running()
        chosen = [(role, rng.randrange(len(fleet.pids(role))) if role != "broker" else 0) for role in victims]
        for role, number in chosen:
            fleet.kill(role, number)
        killed = time.monotonic()
        await asyncio.sleep(0.2)
        for role, number in sorted(chosen, key=lambda victim: victim[0] != "broker"):
            fleet.restart(role, number)
        await until(lambda running=running: all(fleet.seq(job) > seq for job, seq in running.items()), "all went on")
        print(f"{' and '.join(victims)}: {len(running)} jobs went on after {time.monotonic() - killed:.1f} s")


async def test_every_accepted_job_gets_its_undisturbed_result_whatever_is_killed(tmp_path: Path) -> None:
    rng = random.Random(shift(7))
    rounds = [asyncio.Event() for _ in ROUNDS]  # each round has its own jobs, however fast the previous ones were
    fleet = Fleet(tmp_path, workers=3, apis=2, token_seconds=0.02, concurrency=3, max_attempts=20)
    with fleet:
        async with Client(fleet) as client:
            lives = [
                asyncio.create_task(life(client, number, rounds[number % len(rounds)], rng.uniform(0, 1)))
                for number in range(JOBS)
            ]
            await wreak(fleet, rounds, rng)
            ended = await asyncio.gather(*lives)
            jobs = [await client.call("GET", f"/v1/jobs/{job_id}") for job_id, _ in ended]
        # Each job was accepted once, even if the response to the first attempt was lost, and there are no other jobs.
        assert fleet.redis.zcard("reasoner:jobs") == len({job["id"] for job in jobs}) == JOBS
        assert [job["spec"]["problem"] for job in jobs] == [spec(number)["problem"] for number in range(JOBS)]
        for job, (job_id, events) in zip(jobs, ended, strict=True):
            check(job, fleet.log(job_id), events)
        assert client.refusals <= {503}
        assert fleet.redis.zcard("reasoner:due") == 0
        assert fleet.ended_by_themselves() == []

    # The same searches, one by one and undisturbed.
    socket = tmp_path / "quick.sock"
    with processes.process([*NULL_ENGINE, str(socket), "0"], tmp_path / "quick.log"):
        processes.until(socket.exists, "the engine listens")
        for job in jobs:
            outcome = await alone(f"unix://{socket}", job)
            assert (job["status"], job["result"]) == (outcome.status, outcome.result.model_dump())
            assert job["usage"]["generated"] >= outcome.usage.generated
