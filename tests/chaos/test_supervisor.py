"""The supervisor: dead children are restarted, and nothing remains at its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.roles.supervisor import Supervisor, free_port
from tests.chaos.processes import alive, until
from tests.chaos.slow_engine import SlowEngine
from tests.long import mostly_long
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError
from workers.processes.children import StartError

PROGRAM = """
import signal, sys
from pathlib import Path
from threading import Event
from api.roles.supervisor import Supervisor, free_port
from workers.config.settings import load_settings
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
folder = Path(sys.argv[1])
settings = load_settings(data_dir=folder, port=free_port(), engine_url=sys.argv[2])
with Supervisor(settings, log_dir=folder / "logs", ephemeral=True):
    print("ready", flush=True)
    Event().wait()
"""

pytestmark = pytest.mark.timeout(180)


def children(pid: int) -> set[int]:
    """Return the descendants of a process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            child = int(path.parent.name)
            found |= {child} | children(child)
    return found


def supervised(settings: Settings) -> Supervisor:
    return Supervisor(settings, log_dir=settings.data_dir / "logs")


@pytest.mark.parametrize("how", mostly_long([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP], every=2))
def test_no_process_and_no_file_remains_however_the_supervisor_ends(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "data"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, folder, ""], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"ready\n"
        started = children(supervisor.pid)
        assert len(started) >= 5  # broker, engine, worker, API, cleanup process
        supervisor.send_signal(how)
    until(lambda: not any(alive(pid) for pid in started), "all processes are gone", seconds=30)
    until(lambda: not folder.exists(), "all files are gone", seconds=10)


@pytest.fixture
def stack(tmp_path: Path, slow_engine: SlowEngine) -> Iterator[tuple[Supervisor, list[str]]]:
    said: list[str] = []
    settings = load_settings(data_dir=tmp_path, port=free_port(), engine_url=slow_engine.url)
    with Supervisor(settings, log_dir=tmp_path / "logs", on_progress=said.append) as running:
        yield running, said


def role_process(data_dir: Path, mark: bytes) -> int:
    """Return the process of the service in `data_dir` whose command line contains the mark."""

    def has_role(pid: int) -> bool:
        command = read_process_file(pid, "cmdline")
        # Services of other tests may be children of this process as well: theirs name other folders.
        return mark in command and str(data_dir).encode() in command + read_process_file(pid, "environ")

    matches = {pid for pid in children(os.getpid()) if has_role(pid)}
    # A process that the role has just forked has the same command line until it runs another program.
    (match,) = [pid for pid in matches if not any(pid in children(other) for other in matches)]
    return match


def read_process_file(pid: int, name: str) -> bytes:
    """Return the content of a file of /proc, empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize(
    ("role", "mark"),
    mostly_long(
        [
            ("worker", b"api.roles.serve\0worker"),
            ("api", b"api.roles.serve\0api"),
            ("broker", b"unixsocket:"),
        ],
        every=2,
    ),
)
def test_a_dead_child_is_restarted_and_jobs_continue(
    stack: tuple[Supervisor, list[str]], role: str, mark: bytes
) -> None:
    running, said = stack
    data_dir = running.settings.data_dir
    os.kill(role_process(data_dir, mark), signal.SIGKILL)
    until(lambda: any(message.startswith(f"the {role} ended") for message in said), "the death is noticed")
    with httpx.Client(base_url=running.url, timeout=70) as client:

        def answers() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(answers, "the service is ready again")
        job = client.post("/v1/jobs", json={"problem": "1 + 1?", "strategy": {"name": "greedy"}, "seed": 1})
        ended = client.get(job.headers["location"], params={"wait": 60}).json()
        assert ended["finished_at"] is not None, ended


def test_a_model_that_fails_to_load_is_reported_with_the_engines_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("?")
    settings = load_settings(data_dir=tmp_path / "data", port=free_port(), model=str(folder))
    before = children(os.getpid())
    with pytest.raises(StartError, match=r"(?s)engine did not start.*model") as caught, supervised(settings):
        pass
    assert str(folder) in str(caught.value)
    assert children(os.getpid()) == before


def test_an_invalid_model_folder_and_a_taken_port_are_reported_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"config\.json"),
        supervised(load_settings(data_dir=tmp_path, port=free_port(), model="/nowhere")),
    ):
        pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)), supervised(load_settings(data_dir=tmp_path, port=port)):
            pass
    assert list(tmp_path.iterdir()) == []


def test_other_machines_are_not_served_without_keys(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="REASONER_API_KEYS"),
        supervised(load_settings(data_dir=tmp_path, port=free_port(), host="0.0.0.0")),
    ):
        pass


def test_a_search_survives_the_death_of_its_engine(tmp_path: Path) -> None:
    said: list[str] = []
    settings = load_settings(data_dir=tmp_path, port=free_port())
    with (
        Supervisor(settings, log_dir=tmp_path / "logs", on_progress=said.append) as stack,
        httpx.Client(base_url=stack.url, timeout=70) as client,
    ):
        engine = role_process(tmp_path, b"--uds\0")
        spec = {"problem": "Use the numbers 3, 5, 7 to make 26.", "strategy": {"name": "beam", "n": 48}, "seed": 1}
        url = client.post("/v1/jobs", json=spec | {"budget": {"tokens": 1_000_000}}).headers["location"]
        until(lambda: client.get(f"{url}/tree").json()["nodes"], "the search has begun")
        os.kill(engine, signal.SIGKILL)
        ended = client.get(url, params={"wait": 60}).json()
        assert ended["status"] == "completed", ended
        assert ended["attempt"] == 1
        with client.stream("GET", f"{url}/events") as events:
            assert any("engine_unavailable" in line for line in events.iter_lines())
    assert any(message.startswith("the engine ended") for message in said)
