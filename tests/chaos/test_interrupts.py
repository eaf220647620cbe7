"""Ctrl-C for every command that runs processes: the first ends it in order, the second at once, always with
status 130.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from api.roles.supervisor import free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from tests.chaos import processes
from tests.chaos.fleet import NULL_ENGINE
from tests.chaos.processes import alive, until
from tests.chaos.test_supervisor import children

# Ordered shutdowns have no time limit here, so that only a second signal can end a hanging process.
PATIENT = """
import signal, sys
import api.roles.supervisor, workers.broker.embedded
from api.cli.main import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)
api.roles.supervisor.STOP_SECONDS = workers.broker.embedded.STOP_SECONDS = 3600
sys.argv[0] = "reasoner"
main()
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an engine that takes a second per token."""
    folder = tmp_path_factory.mktemp("engine")
    with processes.process([*NULL_ENGINE, str(folder / "engine.sock"), "1"], folder / "engine.log"):
        until((folder / "engine.sock").exists, "the engine listens")
        yield f"unix://{folder / 'engine.sock'}"


class Command:
    """``reasoner`` with its own home folder, in which leftover files would be found."""

    def __init__(self, arguments: list[str], engine: str, home: Path) -> None:
        self.home = home
        self.log = home / "log"
        self.port = free_port()
        settings = {
            "ENGINE_URL": engine,
            "MODEL": POLICY,
            "PRM": VERIFIER,
            "DATA_DIR": str(home / "data"),
            "PORT": str(self.port),
        }
        environment = {f"REASONER_{name}": value for name, value in settings.items()} | {"TMPDIR": str(home)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PATIENT, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=home,
                env=os.environ | environment,
            )
        self.children: set[int] = set()

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> object:
            self.children |= children(self.process.pid)
            assert self.process.poll() is None, self.log.read_text()
            return condition()

        until(look, "the moment has come")

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.log.read_text()

    def has(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.children) >= count

    def answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}{path}").is_success
        return False

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def has_ended(self) -> None:
        """Check the exit status of Ctrl-C, the absence of tracebacks, and that nothing remains."""
        assert self.process.wait(60) == 130, self.log.read_text()
        assert "Traceback" not in self.log.read_text()
        until(lambda: not any(alive(pid) for pid in self.children), "its processes are gone")
        until(lambda: not list(self.home.glob("**/*.sock")), "its sockets are gone")
        until(lambda: not list(self.home.glob("reasoner-*")), "its temporary files are gone")


@contextlib.contextmanager
def command(engine: str, *arguments: str) -> Iterator[Command]:
    with tempfile.TemporaryDirectory(prefix="int") as home:  # short, since it contains sockets
        running = Command(list(arguments), engine, Path(home))
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait()


def signals(pid: int, *kinds: str) -> set[int]:
    """Return the signals that a process has pending (``SigPnd``, ``ShdPnd``) or catches (``SigCgt``)."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(kinds)]
    return {number for mask in masks for number in range(1, 65) if mask >> (number - 1) & 1}


def handled(pid: int) -> bool:
    """Return True once a process has received a Ctrl-C; until then, another one would be merged with it."""
    return signal.SIGINT not in signals(pid, "SigPnd", "ShdPnd")


@pytest.mark.parametrize(
    ("what", "moment"),
    [
        ("serve", "ready"),
        ("demo", "two children"),
        *(
            pytest.param(what, moment, marks=pytest.mark.long)
            for what in ("serve", "demo")
            for moment in ("a child", "two children", "four children", "ready")
            if (what, moment) not in (("serve", "ready"), ("demo", "two children"))
        ),
    ],
)
def test_a_second_ctrl_c_ends_everything_at_any_moment_and_a_third_changes_nothing(
    engine: str, what: str, moment: str
) -> None:
    with command(engine, what) as running:
        moments = {
            "a child": running.has(1),
            "two children": running.has(2),
            "four children": running.has(4),
            "ready": running.says({"serve": "ready at", "demo": "is up at"}[what]),
        }
        running.until(moments[moment])
        for _ in range(3):
            running.interrupt()
            until(lambda: running.process.poll() is not None or handled(running.process.pid), "it has heard it")
        running.has_ended()


@pytest.mark.parametrize("role", [b"worker", pytest.param(b"api", marks=pytest.mark.long)])
def test_a_second_ctrl_c_does_not_wait_for_a_hanging_process(engine: str, role: bytes) -> None:
    with command(engine, "serve") as running:
        running.until(running.says("ready at"))
        [frozen] = [
            pid for pid in running.children if b"api.roles.serve\0" + role in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(frozen, signal.SIGSTOP)
        running.interrupt()
        others = running.children - {frozen}
        until(lambda: sum(alive(pid) for pid in others) < len(others), "it is being stopped")
        running.interrupt()
        running.has_ended()


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_single_role_exits_with_the_status_of_ctrl_c(engine: str, role: str) -> None:
    with command(engine, role) as running:
        if role == "api":
            running.until(lambda: running.answers("/healthz"))
        else:
            running.until(lambda: signal.SIGQUIT in signals(running.process.pid, "SigCgt"))  # Celery's handlers
        running.interrupt()
        running.has_ended()


def test_a_running_evaluation_exits_with_the_status_of_ctrl_c(engine: str) -> None:
    def asked() -> object:
        with httpx.Client(transport=httpx.HTTPTransport(uds=engine.removeprefix("unix://"))) as client:
            return client.get("http://engine/asked").json()["branches"]

    before = asked()
    with command(engine, "eval", "words", "--strategy", "greedy", "--n", "1", "--limit", "2") as running:
        running.until(lambda: asked() != before)
        running.interrupt()
        running.has_ended()
    assert asked() != before
