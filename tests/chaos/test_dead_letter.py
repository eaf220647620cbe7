"""A job that loses its worker repeatedly is dead-lettered; retried, it gets the undisturbed result. Both ends are
delivered to its webhook.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.chaos import processes
from tests.chaos.fleet import NULL_ENGINE, Client, Fleet, alone, check, until
from tests.workers.webhooks.receiver import SECRET, Receiver
from tests.workers.webhooks.test_deliver import receiver

__all__ = ["receiver"]

JOB = {
    "problem": "?",
    "strategy": {"name": "beam", "n": 4, "expansions": 2},
    "budget": {"tokens": 100_000},
    "seed": 3,
    "deterministic": True,
}
ATTEMPTS = 2

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


async def test_a_poison_job_is_dead_lettered_and_its_retry_is_charged_only_for_lost_work(
    tmp_path: Path, receiver: Receiver
) -> None:
    settings = {"concurrency": 1, "max_attempts": ATTEMPTS, "webhook_secret": SECRET, "webhook_allow": "127.0.0.1"}
    with Fleet(tmp_path, workers=1, apis=1, token_seconds=0.03, **settings) as fleet:

        def told() -> list[str]:
            return [json.loads(body)["type"] for _, _, body in receiver.got]

        def journaled() -> int:
            return int(float(fleet.redis.hget(f"reasoner:job:{job_id}", "usage:generated") or 0))

        def unwritten() -> int:
            """Return the number of requested tokens that no journal has."""
            return fleet.asked()["tokens"] - journaled()

        def attempt() -> int:
            return int(fleet.redis.hget(f"reasoner:job:{job_id}", "attempt") or 0)

        async with Client(fleet) as client:
            job_id = await client.submit(JOB | {"webhook": receiver.url}, key="poison")
            await until(lambda: journaled() > 0 and unwritten() > 0, "it gets on")
            os.kill(fleet.pids("engine")[0], signal.SIGSTOP)  # from now on no attempt makes progress
            for number in range(1, ATTEMPTS + 2):  # the first attempt made progress, so it does not count
                await until(lambda number=number: attempt() == number, "a worker has it")
                fleet.kill("worker")
                fleet.restart("worker")
            await until(lambda: fleet.redis.zcard("reasoner:jobs:dead") == 1, "it is given up")
            os.kill(fleet.pids("engine")[0], signal.SIGCONT)
            assert [event["type"] for event in await client.follow(job_id)][-1] == "job.failed"
            (dead,) = (await client.call("GET", "/v1/jobs?status=dead"))["data"]
            assert (dead["id"], dead["error"]["code"]) == (job_id, "max_attempts")

            await until(lambda: told() == ["job.failed"], "its client has been told")

            written, asked = journaled(), fleet.asked()["tokens"]
            assert (await client.call("POST", f"/v1/jobs/{job_id}/retry"))["status"] == "queued"
            events = await client.follow(job_id)
            await until(lambda: told() == ["job.failed", "job.completed"], "its client has been told again")
            job = await client.call("GET", f"/v1/jobs/{job_id}")
            asked = fleet.asked()["tokens"] - asked
        check(job, fleet.log(job_id), events)
        assert [event["type"] for event in events].count("job.failed") == 1

    socket = tmp_path / "quick.sock"
    with processes.process([*NULL_ENGINE, str(socket), "0"], tmp_path / "quick.log"):
        processes.until(socket.exists, "the engine listens")
        undisturbed = await alone(f"unix://{socket}", job)
    assert (job["status"], job["result"]) == (undisturbed.status, undisturbed.result.model_dump())
    assert job["usage"]["generated"] == undisturbed.usage.generated
    # Journaled results are not requested again.
    assert asked == undisturbed.usage.generated - written > 0
