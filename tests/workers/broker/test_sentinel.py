"""Sentinels: store and Celery find the primary through them, also after a failover to its replica."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.exceptions import OperationalError

from api.roles.supervisor import free_port
from tests.workers.store.helpers import SPEC, claim, submit
from workers.broker.embedded import find_server
from workers.broker.wakeups import make_celery
from workers.config.settings import load_settings
from workers.processes.children import spawn, stop
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.jobs import JobStore

PASSWORD = "a-password-that-nobody-else-may-see"
PATIENCE = 60.0


class Servers:
    """A primary, its replica, and three Sentinels that replace it half a second after its end."""

    def __init__(self, folder: Path, running: contextlib.ExitStack) -> None:
        self._folder, self._running = folder, running
        self.ports = [free_port(), free_port()]
        login = f"requirepass {PASSWORD}\nmasterauth {PASSWORD}"
        self.primary = self._start("primary", self.ports[0], f"{login}\nrepl-diskless-sync-delay 0")
        self._start("replica", self.ports[1], f"{login}\nreplicaof 127.0.0.1 {self.ports[0]}")
        self.sentinels = [free_port() for _ in range(3)]
        watched = (
            f"sentinel monitor jobs 127.0.0.1 {self.ports[0]} 2\nsentinel auth-pass jobs {PASSWORD}\n"
            "sentinel down-after-milliseconds jobs 500\nsentinel failover-timeout jobs 5000"
        )
        for number, port in enumerate(self.sentinels):
            self._start(f"sentinel{number}", port, watched, "--sentinel")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/jobs/0"

    def ask(self, port: int, *command: str) -> Any:
        password = None if port in self.sentinels else PASSWORD
        with redis.Redis(port=port, password=password, decode_responses=True, socket_timeout=5) as client:
            return client.execute_command(*command)

    def _start(self, name: str, port: int, lines: str, *options: str) -> subprocess.Popen[bytes]:
        config = self._folder / f"{name}.conf"
        config.write_text(f'port {port}\nbind 127.0.0.1\ndir "{self._folder}"\nsave ""\n{lines}\n')
        process = spawn(
            [find_server(), str(config), *options], log=self._folder / f"{name}.log", death_signal=signal.SIGKILL
        )
        self._running.callback(stop, process, grace=5.0)
        return process


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; a server that does not answer yet does not fulfil it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(redis.RedisError):
                if await asyncio.to_thread(condition):
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as running:
        yield Servers(tmp_path, running)


@pytest.fixture
async def store(servers: Servers) -> AsyncIterator[JobStore]:
    """A store once all Sentinels know each other and the replica."""

    def is_ready() -> bool:
        found = [servers.ask(port, "SENTINEL", "MASTER", "jobs") for port in servers.sentinels]
        return all((int(state["num-other-sentinels"]), int(state["num-slaves"])) == (2, 1) for state in found)

    await eventually(is_ready)
    store = JobStore(servers.url, retry_seconds=PATIENCE)
    yield store
    await store.close()


@pytest.mark.timeout(180)
async def test_jobs_go_on_after_a_failover(servers: Servers, store: JobStore) -> None:
    job_id = await submit(store)
    held = await claim(store, job_id)
    settings = load_settings(redis_url=servers.url)
    with make_celery(settings).connection_for_write() as celery:
        assert celery.ensure_connection(max_retries=1).connected
    assert await asyncio.to_thread(servers.ask, servers.ports[0], "WAIT", "1", "5000") == 1
    servers.primary.kill()
    assert await store.finish(held, "completed")  # it tries again for as long as the failover takes
    assert (await store.get(job_id))["status"] == "completed"
    assert servers.ask(servers.ports[1], "ROLE")[0] == "master"
    again, _ = await store.submit(SPEC, owner="her", queue_cap=9)
    assert (await store.get(again["id"]))["status"] == "queued"
    with make_celery(settings).connection_for_write() as celery:
        assert celery.ensure_connection(max_retries=10).connected


@pytest.mark.timeout(120)
async def test_what_is_wrong_is_said(servers: Servers, store: JobStore) -> None:
    await store.check_broker()
    unknown = JobStore(servers.url.replace("/jobs/", "/other/"))
    with pytest.raises(BROKER_DOWN) as caught:
        await unknown.check_broker()
    assert describe_outage(caught.value) == "the broker cannot be found: the Sentinels know no primary 'other'"
    await unknown.close()
    nobody = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{free_port()}/jobs"
    away = JobStore(nobody)
    with pytest.raises(BROKER_DOWN) as caught:
        await away.check_broker()
    assert describe_outage(caught.value) == "the broker cannot be found: no Sentinel answers"
    assert PASSWORD not in str(caught.value)
    await away.close()
    with (
        make_celery(load_settings(redis_url=nobody)).connection_for_write() as celery,
        pytest.raises(OperationalError, match="no Sentinel answers"),
    ):
        celery.ensure_connection(max_retries=1)
