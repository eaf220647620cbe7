"""A broker that answers, but cannot do its work: every such answer counts as a broker that is away, with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import structlog

from workers.broker.console_watch import BrokerWatch
from workers.broker.embedded import EmbeddedBroker
from workers.broker.reaper import Reaper
from workers.broker.wakeups import make_celery, make_templates
from workers.config.settings import load_settings
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.files import FileStore
from workers.store.jobs import JobStore

PASSWORD = "kD9-mVq2.xR7_tW4"

STATES: dict[str, tuple[Callable[[redis.Redis], object], str]] = {
    "full": (lambda client: client.config_set("maxmemory", 1), "memory is full"),
    "replica": (lambda client: client.replicaof("127.0.0.1", 1), "read-only replica"),
    "no replicas": (lambda client: client.config_set("min-replicas-to-write", 1), "too few of its replicas"),
    "password": (lambda client: client.config_set("requirepass", PASSWORD), "refuses the login"),
    "permissions": (lambda client: client.execute_command("ACL", "SETUSER", "default", "-set", "-evalsha"), "ACL"),
}
"""Changes to a server, each with a part of the reason that is then given."""


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path) as running:
        yield running


def outage(url: str) -> str:
    """Return the reason that a store gives for the first command that fails; empty if none does."""

    async def ask() -> str:
        store = JobStore(url)
        try:
            await store.reap(3)
            await store.check_broker()
        except BROKER_DOWN as error:
            return describe_outage(error)
        finally:
            await store.close()
        return ""

    return asyncio.run(ask())


@pytest.mark.parametrize("state", STATES)
def test_the_store_gives_the_reason_of_a_real_server(own_broker: EmbeddedBroker, state: str) -> None:
    change, reason = STATES[state]
    with redis.Redis.from_url(own_broker.url) as client:
        assert outage(own_broker.url) == ""
        change(client)
        assert reason in outage(own_broker.url)


def test_a_server_whose_snapshots_fail_cannot_write(own_broker: EmbeddedBroker) -> None:
    (own_broker.data_dir / "broker" / "dump.rdb" / "in the way").mkdir(parents=True)
    with redis.Redis.from_url(own_broker.url) as client:
        client.config_set("save", "3600 1")
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            pass
        assert "saving to its disk fails" in outage(own_broker.url)


def test_a_replica_without_its_primary_that_gives_no_stale_answers(own_broker: EmbeddedBroker) -> None:
    with redis.Redis.from_url(own_broker.url) as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)
        assert "has lost its primary" in outage(own_broker.url)


def test_a_server_in_a_long_script(own_broker: EmbeddedBroker) -> None:
    with redis.Redis.from_url(own_broker.url) as client, redis.Redis.from_url(own_broker.url) as other:
        client.config_set("busy-reply-threshold", 1)

        def spin() -> None:
            with contextlib.suppress(redis.RedisError), redis.Redis.from_url(own_broker.url) as third:
                third.eval("while true do end", 0)

        spinning = threading.Thread(target=spin)
        spinning.start()
        reason = ""
        while "busy with a script" not in reason:
            reason = outage(own_broker.url)
        other.execute_command("SCRIPT KILL")
        spinning.join()
        assert outage(own_broker.url) == ""


@pytest.mark.parametrize("user", ["", "nobody"])
def test_a_wrong_login_is_named_without_the_password(own_broker: EmbeddedBroker, user: str) -> None:
    with redis.Redis.from_url(own_broker.url) as client:
        client.config_set("requirepass", "another")
        there = own_broker.url.replace("unix://", f"unix://{user}:{PASSWORD}@")
        assert outage(there) == "the broker refuses the login of REASONER_REDIS_URL"


@pytest.mark.parametrize("number", [99, 999_999_999])
def test_a_database_that_the_server_does_not_have(own_broker: EmbeddedBroker, number: int) -> None:
    assert outage(f"{own_broker.url}?db={number}") == "the broker has no database of the number in REASONER_REDIS_URL"


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Run a server that answers every command with ``reply``; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while client.recv(65536):
                client.sendall(reply)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"redis://user:{PASSWORD}@127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("-LOADING Redis is loading the dataset in memory", "loading its data"),
        ("-MISCONF Errors writing to the AOF file: No space left on device", "the broker cannot write: disk full"),
        ("-MISCONF Redis is configured to save RDB snapshots, but it's currently unable", "saving to its disk fails"),
        ("-CLUSTERDOWN Hash slot not served", "its cluster is down"),
        ("-MOVED 3999 127.0.0.1:6381", "is a cluster, which is not supported"),
        ("-CROSSSLOT Keys in request don't hash to the same slot", "is a cluster, which is not supported"),
        ("-TRYAGAIN Multiple keys request during rehashing of slot", "is a cluster, which is not supported"),
        ("-UNBLOCKED force unblock from blocking operation, instance state changed", "has just become a replica"),
        ("-NOREPLICAS Not enough good replicas to write.", "too few of its replicas"),
        ("-DENIED Redis is running in protected mode because", "protected mode"),
        ("-ERR max number of clients reached", "too many connections"),
        ("-ERR invalid DB index", "has no database of the number"),
        ("-ERR invalid password", "refuses the login"),
        ("-ERR Client sent AUTH, but no password is set", "refuses the login"),
        (f"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `user`, `{PASSWORD}`, ", "command"),
        (f"-ERR unknown command 'AUTH', with args beginning with: 'user' '{PASSWORD}' ", "command that is needed"),
        # before version 7, of a script
        (
            "-ERR Error running script (call to f_ab): @user_script:1: @user_script: 1: -OOM command not allowed",
            "memory is full",
        ),
        (
            "-ERR Error running script (call to f_ab): @user_script:1: @user_script: 1: -READONLY You can't write",
            "read-only replica",
        ),
        ("HTTP/1.1 400 Bad Request", "does not speak the protocol of Redis"),
    ],
)
def test_answers_of_other_versions_and_states(reply: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with answering(f"{reply}\r\n".encode()) as url:
        assert reason in outage(url)
        app = make_celery(load_settings(redis_url=url))
        connection = app.connection_for_write()
        with pytest.raises((*connection.connection_errors, *connection.channel_errors)) as failed:
            connection.connect()
        chain: BaseException | None = failed.value
        while chain is not None:
            assert PASSWORD not in f"{chain} {chain!r} {chain.args}"
            chain = chain.__context__
    assert PASSWORD not in caplog.text


def test_a_connection_is_made_anew_after_a_refusal_since_the_primary_may_be_another_server(
    own_broker: EmbeddedBroker,
) -> None:
    """After a failover the address leads to the new primary, but open connections still to the old one."""

    async def run() -> None:
        store = JobStore(own_broker.url)
        with redis.Redis.from_url(own_broker.url) as client:
            await store.check_broker()
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(BROKER_DOWN):
                await store.check_broker()
            client.replicaof("no", "one")
            before = client.info("stats")["total_connections_received"]
            await store.check_broker()
            assert client.info("stats")["total_connections_received"] == before + 1
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_an_evicting_policy_is_named_once_in_the_log_and_on_the_console(
    own_broker: EmbeddedBroker, policy: str, tmp_path: Path
) -> None:
    async def sweep() -> list[str]:
        store, app = JobStore(own_broker.url), make_celery(load_settings(redis_url=own_broker.url))
        reaper = Reaper(store, FileStore(store, tmp_path), make_templates(app), max_attempts=3, retention=60)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await reaper.sweep_and_report()
        await store.close()
        return [entry["event"] for entry in logs]

    lines: list[str] = []
    with redis.Redis.from_url(own_broker.url) as client:
        assert asyncio.run(sweep()) == []
        client.config_set("maxmemory-policy", policy)
        [event] = asyncio.run(sweep())
        BrokerWatch(own_broker.url, lines.append).check_policy()
    assert f"maxmemory-policy {policy}" in event
    assert lines == [event]


def test_outages_are_logged_and_shown_when_they_change(
    own_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("workers.broker.console_watch.CHECK_SECONDS", 0.0)
    lines: list[str] = []

    async def run() -> list[str]:
        store, app = JobStore(own_broker.url), make_celery(load_settings(redis_url=own_broker.url))
        reaper = Reaper(store, FileStore(store, tmp_path), make_templates(app), max_attempts=3, retention=60)
        watch = BrokerWatch(own_broker.url, lines.append)
        with structlog.testing.capture_logs() as logs, redis.Redis.from_url(own_broker.url) as client:
            for maxmemory in (0, 1, 1, 0, 0):
                client.config_set("maxmemory", maxmemory)
                await reaper.sweep_and_report()
                watch.check_when_due()
        await store.close()
        return [f"{entry['event']} {entry.get('reason', '')}".strip() for entry in logs]

    full = "the broker cannot write: its memory is full (maxmemory)"
    assert asyncio.run(run()) == [f"broker unavailable {full}", "broker available again"]
    assert lines == [full, "the broker works again"]
