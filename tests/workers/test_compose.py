"""compose.yaml: permissions of its Redis users, and health checks that detect working roles."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from workers.broker.embedded import find_server
from workers.config.settings import Settings, load_settings
from workers.processes.children import read_tail, spawn, stop

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
PASSWORDS = {"REASONER_REDIS_API": "of-the-api", "REASONER_REDIS_WORKER": "of-the-worker"}
OPERATOR = "user operator on >of-the-operator ~* &* +@all\n"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Start a server with the users of the file and one for this test; yield its port."""
    users = COMPOSE["configs"]["users"]["content"] + OPERATOR
    for name, password in PASSWORDS.items():
        users = users.replace(f"${{{name}:?}}", password)
    assert "$" not in users
    (tmp_path / "users.acl").write_text(users)
    port, log = free_port(), tmp_path / "server.log"
    options = ["--port", str(port), "--bind", "127.0.0.1", "--aclfile", str(tmp_path / "users.acl")]
    server = spawn([find_server(), *options, "--dir", str(tmp_path)], log=log, death_signal=signal.SIGKILL)
    try:
        until(lambda: "Ready to accept connections" in read_tail(log), "the server is ready")
        yield port
    finally:
        stop(server, grace=10)


@pytest.mark.parametrize("user", ["api", "worker"])
@pytest.mark.parametrize(
    "command", ["FLUSHALL", "CONFIG GET *", "KEYS *", "SHUTDOWN", "ACL LIST", "MONITOR", "GET other"]
)
def test_no_role_may_run_commands_that_it_does_not_need(port: int, user: str, command: str) -> None:
    with (
        redis.Redis(port=port, username=user, password=f"of-the-{user}") as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command.split())


def test_anonymous_access_is_denied(port: int) -> None:
    with redis.Redis(port=port) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


def test_the_health_check_needs_no_password_and_its_user_may_do_nothing_else(port: int) -> None:
    with redis.Redis(port=port, username="health", password="any") as client:
        assert client.ping()
        for command in ("GET reasoner:jobs", "INFO", "PUBLISH a b", "KEYS *", "CLIENT LIST", "EVAL return(1) 0"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


def is_healthy(service: str, **changes: object) -> bool:
    """Run a service's health check here, with these parts of its text replaced."""
    kind, *command = SERVICES[service]["healthcheck"]["test"]
    if kind == "CMD-SHELL":
        command = ["/bin/sh", "-c", *(text.replace("$$", "$") for text in command)]
    assert kind in ("CMD", "CMD-SHELL")
    assert command[0] in ("python", "/bin/sh")
    command = [sys.executable if text == "python" else text for text in command]
    for before, after in changes.items():
        assert any(before in text for text in command)
        command = [text.replace(before, str(after)) for text in command]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.timeout(240)
def test_the_health_check_of_an_engine_succeeds_only_while_it_serves(tmp_path: Path) -> None:
    number = free_port()
    env = os.environ | {"REASONER_ENGINE_URL": f"http://127.0.0.1:{number}"}
    assert not is_healthy("engine", **{"8100": number})
    log = tmp_path / "engine.log"
    engine = spawn([sys.executable, "-m", "api.cli.main", "engine"], log=log, env=env, death_signal=signal.SIGKILL)
    try:
        until(lambda: is_healthy("engine", **{"8100": number}), "the engine is healthy", seconds=120)
    finally:
        stop(engine, grace=15)
    assert not is_healthy("engine", **{"8100": number})


@pytest.mark.timeout(240)
def test_a_job_runs_from_submission_to_result_without_a_denied_command(port: int, tmp_path: Path) -> None:
    engine, listening, alive = tmp_path / "engine.sock", free_port(), tmp_path / "worker.alive"

    def settings(user: str) -> Settings:
        address = f"redis://{user}:of-the-{user}@127.0.0.1:{port}/0"
        return load_settings(
            redis_url=address,
            engine_url=f"unix://{engine}",
            model="null",
            prm="null-verifier",
            data_dir=tmp_path,
            port=listening,
            alive_file=alive,
        )

    commands = {
        "engine": (["benchmarks.service.null_engine", str(engine), "0"], {}),
        "api": (["api.roles.serve", "api"], settings("api").environment()),
        "worker": (["api.roles.serve", "worker"], settings("worker").environment()),
    }
    with contextlib.ExitStack() as running:
        for name, (module, env) in commands.items():
            command, log = [sys.executable, "-m", *module], tmp_path / f"{name}.log"
            role = spawn(command, log=log, env=os.environ | env, death_signal=signal.SIGKILL)
            running.callback(stop, role, grace=15)
        client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{listening}", timeout=70))

        def ready() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(ready, "the API is ready")
        spec = {"problem": "1 + 1?", "strategy": {"name": "best_of_n", "n": 2}, "seed": 1}
        job = client.post("/v1/jobs", json=spec, headers={"Prefer": "wait=60"}).json()
        assert job["status"] == "completed", job
        assert client.get("/metrics").status_code == 200
        assert is_healthy("api", **{"8000": listening})
        assert is_healthy("worker", **{SERVICES["worker"]["environment"]["REASONER_ALIVE_FILE"]: alive})
        with redis.Redis(port=port, username="operator", password="of-the-operator") as operator:
            assert operator.acl_log() == []
    assert not is_healthy("api", **{"8000": listening})
    assert not is_healthy("worker", **{SERVICES["worker"]["environment"]["REASONER_ALIVE_FILE"]: alive})
