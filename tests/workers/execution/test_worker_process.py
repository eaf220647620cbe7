"""A worker's process: it outlasts every refusal of its broker, and its exit status tells a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from api.roles.serve import BATCH_NICENESS
from tests.chaos import processes
from tests.workers.broker.test_refusals import STATES
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import load_settings
from workers.execution.liveness import TOUCH_SECONDS

UNDO = {
    "full": ("CONFIG", "SET", "maxmemory", "0"),
    "replica": ("REPLICAOF", "NO", "ONE"),
    "no replicas": ("CONFIG", "SET", "min-replicas-to-write", "0"),
    "password": ("CONFIG", "SET", "requirepass", ""),
    "permissions": ("ACL", "SETUSER", "default", "+@all"),
}

FAILING = """
from celery import bootsteps
from pathlib import Path
from workers.config.settings import load_settings
from workers.execution.tasks import make_worker, serve
import sys
app = make_worker(load_settings(redis_url=sys.argv[1], data_dir=Path(sys.argv[2])))
class Failing(bootsteps.StartStopStep):
    requires = ("celery.worker.consumer.tasks:Tasks",)
    def start(self, parent):
        raise RuntimeError("a fault in the worker")
app.steps["consumer"].add(Failing)
serve(app, ("batch",))
"""


def test_a_worker_of_the_batch_queue_alone_yields_processors_and_no_other_process(tmp_path: Path) -> None:
    for queues, niceness in ((("batch",), BATCH_NICENESS), (("interactive", "batch"), 0)):
        folder = tmp_path / "-".join(queues)
        alive = folder / "worker.alive"
        settings = load_settings(data_dir=folder, alive_file=alive, prm="none", queues=queues)
        with EmbeddedBroker(folder) as broker, processes.role("worker", settings, folder / "worker.log") as worker:
            processes.until(alive.exists, "the worker consumes", seconds=90)
            own, of_worker = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, worker.pid))
            assert of_worker == own + niceness
            assert broker.process is not None
            assert os.getpriority(os.PRIO_PROCESS, broker.process.pid) == own


@pytest.mark.timeout(240)
def test_a_worker_outlasts_each_refusal_and_takes_messages_again(tmp_path: Path) -> None:
    alive = tmp_path / "worker.alive"

    def age() -> float:
        return time.time() - alive.stat().st_mtime

    def wait_until_touched_again(what: str) -> None:
        """Wait for the end of a start: a connection that is cut before is made anew unnoticed."""
        begun = alive.stat().st_mtime
        processes.until(lambda: alive.stat().st_mtime > begun, what)

    with EmbeddedBroker(tmp_path) as broker, redis.Redis.from_url(broker.url) as client:
        settings = load_settings(redis_url=broker.url, data_dir=tmp_path, alive_file=alive, prm="none")
        with processes.role("worker", settings, tmp_path / "worker.log") as worker:
            processes.until(alive.exists, "the worker consumes", seconds=90)
            wait_until_touched_again("it fetches messages")
            for state, (change, _) in STATES.items():
                change(client)
                client.execute_command("CLIENT", "KILL", "TYPE", "normal")
                processes.until(lambda: age() > 2 * TOUCH_SECONDS, f"{state}: it stops")
                client.execute_command(*UNDO[state])
                processes.until(lambda: age() < TOUCH_SECONDS, f"{state}: it goes on")
                wait_until_touched_again(f"{state}: it fetches messages")
                assert worker.poll() is None


def test_a_worker_that_fails_ends_with_a_status_that_says_so(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        command = [sys.executable, "-c", FAILING, broker.url, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "a fault in the worker" in ended.stderr
    assert ended.returncode == 1
