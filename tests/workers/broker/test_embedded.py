"""The embedded broker: private, durable, and stopped with its owner."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from tests.chaos.processes import alive, until
from workers.broker.embedded import EmbeddedBroker, broker_url, find_server, socket_path
from workers.broker.wakeups import RUN_TASK, make_celery
from workers.config.broker_address import parse_broker_url
from workers.config.settings import load_settings
from workers.processes.children import StartError
from workers.store.broker_connections import make_client


def test_data_survives_a_restart_and_no_other_file_remains(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker, redis.Redis.from_url(broker.url) as client:
        client.set("key", "value")
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("port")["port"] == "0"
    assert not broker.socket.parent.exists()
    with EmbeddedBroker(tmp_path) as broker, redis.Redis.from_url(broker.url) as client:
        assert client.get("key") == b"value"


def test_only_its_user_can_connect(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        for path in (broker.socket, broker.socket.parent, tmp_path / "broker"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_running_broker_is_shared_and_not_stopped_by_other_users_of_it(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as owner:
        with EmbeddedBroker(tmp_path) as guest:
            assert guest.process is None
            assert guest.url == owner.url
        with redis.Redis.from_url(owner.url) as client:
            assert client.ping()


def test_a_stale_socket_does_not_prevent_a_start(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as first:
        assert first.process is not None
        first.process.kill()
        first.process.wait()
        assert first.socket.exists()
        assert first.ended
        with EmbeddedBroker(tmp_path) as second:
            assert second.process is not None


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    data_dir = tmp_path / ("x" * 120)
    assert len(os.fsencode(socket_path(data_dir))) < 100
    assert socket_path(data_dir) != socket_path(tmp_path / ("y" * 120))
    with EmbeddedBroker(data_dir) as broker, redis.Redis.from_url(broker.url) as client:
        assert client.ping()
    assert not broker.socket.parent.exists()


def test_the_broker_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from workers.broker.embedded import EmbeddedBroker\n"
        "broker = EmbeddedBroker(Path(sys.argv[1])); broker.start(); print(broker.process.pid, flush=True)\n"
        "threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        broker = int(parent.stdout.readline())
        assert alive(broker)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not alive(broker), "the broker is gone", seconds=20)
    assert not socket_path(tmp_path).exists()


def test_a_failed_start_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "appendonlydir").write_text("in the way")
    with pytest.raises(StartError, match="appendonlydir"):
        EmbeddedBroker(tmp_path).start()


def test_a_server_on_path_takes_precedence_over_the_one_in_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(find_server()).is_file()
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(program)


def test_a_configured_broker_takes_precedence(tmp_path: Path) -> None:
    assert broker_url(load_settings(redis_url="redis://somewhere:1/2", data_dir=tmp_path)) == "redis://somewhere:1/2"
    assert broker_url(load_settings(data_dir=tmp_path)) == f"unix://{tmp_path}/run/broker.sock"


@pytest.mark.parametrize("name", ["50% off", "a b", "what?db=7", "a#b", "a@b", "ü", "a+b"])
def test_the_store_and_celery_find_the_broker_of_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    settings = load_settings(data_dir=tmp_path / name)
    with EmbeddedBroker(settings.data_dir) as broker:
        assert broker.url == broker_url(settings)
        address = parse_broker_url(broker.url)
        assert (address.path, address.database) == (str(broker.socket), 0)
        make_celery(settings).send_task(RUN_TASK, args=["job_1"], queue="interactive", retry=False)
        with make_client(address) as client:
            assert client.llen("interactive") == 1


def test_a_guest_knows_who_started_its_broker_and_starts_its_own_when_that_goes(tmp_path: Path) -> None:
    owner, guest = EmbeddedBroker(tmp_path), EmbeddedBroker(tmp_path)
    owner.start()
    try:
        guest.start()
        assert (guest.process, guest.starter, guest.ended) == (None, str(os.getpid()), False)
        with redis.Redis.from_url(owner.url) as client:
            client.set("key", "value")
        owner.stop()
        assert guest.ended
        guest.start()
        assert guest.process is not None
        assert not guest.ended
        with redis.Redis.from_url(guest.url) as client:
            assert client.get("key") == b"value"
    finally:
        owner.stop()
        guest.stop()


def test_no_second_server_starts_on_the_file_of_one_that_is_still_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedBroker(tmp_path) as owner, EmbeddedBroker(tmp_path) as guest:
        assert owner.process is not None
        owner.process.send_signal(signal.SIGSTOP)  # it neither answers nor ends
        try:
            with monkeypatch.context() as patch:
                patch.setattr("workers.broker.embedded.START_SECONDS", 0.3)
                with pytest.raises(StartError, match="does not answer"):
                    guest.start()
        finally:
            owner.process.send_signal(signal.SIGCONT)
        guest.start()
        assert guest.process is None


def test_a_broker_that_cannot_write_is_shared_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker(tmp_path):
        monkeypatch.setattr(redis.Redis, "ping", _refuse_as_with_a_full_disk)
        with EmbeddedBroker(tmp_path) as guest:
            assert guest.process is None


def _refuse_as_with_a_full_disk(_: redis.Redis) -> bool:
    raise redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")


def test_a_folder_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "appendonlydir").write_text("in the way")
    monkeypatch.setattr("workers.broker.embedded.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StartError, match="the broker cannot write: disk full"):
        EmbeddedBroker(tmp_path).start()
