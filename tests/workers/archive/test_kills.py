"""A process that is killed at any step of a move: each job is there once, and as it was."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.workers.archive.helpers import end, find_places, list_ids, make_ended, submit_job
from workers.archive.archive import Archive
from workers.broker.archiver import Archiver
from workers.store.jobs import JobStore, NoSuchJob

PROGRAM = """
import asyncio, os, signal, sys
from sqlalchemy import event
from workers.archive.archive import Archive
from workers.broker.archiver import Archiver
from workers.store.jobs import JobStore

url, archive_url, left = sys.argv[1], sys.argv[2], int(sys.argv[3])


def step(*_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)


class SteppedStore(JobStore):
    async def command(self, *command):
        answer = await super().command(*command)
        step()
        return answer

    async def script(self, script, *arguments):
        answer = await super().script(script, *arguments)
        step()
        return answer


async def main():
    archive = Archive(archive_url)
    await archive.check()
    for name in ("before_cursor_execute", "commit"):
        event.listen(archive.engine.sync_engine, name, step)
    store = SteppedStore(url, archive=archive)
    await Archiver(store, archive, age=0, retention=1e6).move()
    await store.close()
    await archive.close()


asyncio.run(main())
"""


def move_until(url: str, archive_url: str, num_steps: int) -> bool:
    """Move jobs in a process that is killed after so many steps. Return True if it ended before."""
    command = [sys.executable, "-c", PROGRAM, url, archive_url, str(num_steps)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode == 0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_kill_between_any_two_steps_of_a_move_loses_no_job_and_doubles_none(
    url: str, archive_url: str, store: JobStore, archive: Archive
) -> None:
    num_steps = 0
    has_ended = False
    while not has_ended:
        kept, retried, deleted = await make_ended(store), await make_ended(store, "failed"), await make_ended(store)
        active = await submit_job(store)
        before = [await store.get(kept), await store.load_events(kept), await store.load_events(retried)]
        await store.command("DEL", "reasoner:archiver")  # the right of the process before, which is dead
        has_ended = move_until(url, archive_url, num_steps)
        num_steps += 1
        assert await list_ids(store) == [active, deleted, retried, kept]
        assert [await store.get(kept), await store.load_events(kept), await store.load_events(retried)] == before
        await store.delete(deleted)
        await store.retry(retried, queue_cap=9)
        assert await list_ids(store) == [active, retried, kept]
        await store.command("DEL", "reasoner:archiver")
        archiver = Archiver(store, archive, age=0, retention=1e6)
        await archiver.move()
        assert await list_ids(store) == [active, retried, kept]
        assert [await find_places(store, archive, job_id) for job_id in (kept, retried, deleted, active)] == [
            (False, True), (True, False), (False, False), (True, False),
        ]  # fmt: skip
        with pytest.raises(NoSuchJob):
            await store.get(deleted)
        assert (await store.get(retried))["status"] == "queued"
        for job_id in (retried, active):
            await end(store, job_id)
        await archiver.move()
        assert await list_ids(store) == [active, retried, kept]
        assert [await store.get(kept), await store.load_events(kept)] == before[:2]
        assert await store.command("HLEN", "reasoner:archiving") == 0
        for job_id in (kept, retried, active):
            await store.delete(job_id)
    assert num_steps > 10
