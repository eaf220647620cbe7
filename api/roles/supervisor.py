"""Broker, engine, worker and API on one machine, as child processes of this one.

The supervisor starts them, waits until a job could run, restarts those that die, and stops all of them. Even after
``kill -9``, no process and no socket remains: the kernel ends the children, and a cleanup process removes the files
when its end of a pipe to this process closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from engine.installation import require_engine
from engine.protocol.types import EngineError
from workers.broker.console_watch import BrokerWatch
from workers.broker.embedded import EmbeddedBroker, broker_url, socket_path
from workers.config.address import reachable_host
from workers.config.broker_address import parse_broker_url
from workers.config.engine_options import ENGINE_OPTIONS
from workers.config.model_folders import check_models
from workers.config.settings import QUEUES, Settings
from workers.config.types import ConfigError, is_loopback, require_model_folder
from workers.processes.children import StartError, make_private_folder, read_tail, spawn, stop, wait_for_exit
from workers.processes.shutdown import interruptible, is_forced, uninterrupted
from workers.store.keys import has_stored_keys

STOP_SECONDS = 10.0
STEADY_SECONDS = 60.0
LONGEST_PAUSE = 10.0
_POLL_SECONDS = 0.2
_CLEANUP_SCRIPT = (
    'cat >/dev/null; n=0; until rm -rf -- "$@" 2>/dev/null || [ $n -ge 50 ]; do n=$((n+1)); sleep 0.1; done'
)


class Role:
    """One child process, with its recent failures."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._env = env
        self._started = 0.0
        self._log_start = 0
        self._deaths = 0
        self._due: float | None = None

    def start(self) -> None:
        self._started = time.monotonic()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with uninterrupted():
            self.process = spawn(self._command, log=self.log, env=self._env, death_signal=signal.SIGKILL)

    @property
    def exit_status(self) -> int | None:
        """The exit status; ``None`` while the process runs."""
        return None if self.process is None else self.process.poll()

    def read_log_end(self) -> str:
        """Return the end of its log since its last start, without older entries of the same file."""
        return read_tail(self.log, since=self._log_start)

    def restart_when_due(self) -> float | None:
        """Restart a dead process when it is due: at once after a first death, then after growing pauses. Return the
        pause when it begins.
        """
        now = time.monotonic()
        if self._due is None:
            self._deaths = 1 if now - self._started > STEADY_SECONDS else self._deaths + 1
            pause = min(LONGEST_PAUSE, 0.5 * 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
            self._due = now + pause
        else:
            pause = None
        if now >= self._due:
            self._due = None
            self.start()
        return pause

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process, grace=STOP_SECONDS)


class Supervisor:
    """Context manager around all child processes; inside it, ``url`` answers. ``ephemeral`` removes the data folder at
    the end.

    Enter it in the main thread, since children live as long as the thread that started them. Raises ``ConfigError`` and
    ``StartError``.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log_dir: Path,
        on_progress: Callable[[str], None] = lambda _: None,
        ephemeral: bool = False,
    ) -> None:
        self.settings = settings
        self.log_dir = log_dir
        self.url = f"http://{reachable_host(settings.host)}:{settings.port}"
        self._report = on_progress
        self._ephemeral = ephemeral
        self._broker: EmbeddedBroker | None = None
        self._broker_watch: BrokerWatch | None = None
        self._roles: list[Role] = []
        self._cleanup_process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._stopped = threading.Event()
        # A daemon: a process that ends without stopping it must not wait for this thread.
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self._signals.enter_context(interruptible())
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        settings = self.settings
        socket_folder = socket_path(settings.data_dir).parent
        engine_socket = socket_folder / f"engine-{os.getpid()}.sock"
        with uninterrupted():
            self._cleanup_process = _spawn_cleanup_process(
                [settings.data_dir, socket_folder] if self._ephemeral else [engine_socket]
            )
        check_models(settings)
        check_port(settings.host, settings.port)
        local_engine = settings.has_local_engine
        engine = engine_command(settings, ["--uds", str(engine_socket)]) if local_engine else []
        self.log_dir.mkdir(parents=True, exist_ok=True)
        make_private_folder(socket_folder)

        redis_url = settings.redis_url
        if redis_url is None:
            self._report("starting the broker")
            self._broker = EmbeddedBroker(settings.data_dir)
            self._start_broker(self._broker)
            redis_url = self._broker.url
        self._broker_watch = BrokerWatch(redis_url, self._report)
        self._broker_watch.check_policy()
        check_bind(settings)
        addresses: dict[str, object] = {"redis_url": redis_url}
        if local_engine:
            addresses["engine_url"] = (f"unix://{engine_socket}",)
        env = os.environ | settings.model_copy(update=addresses).environment()
        if local_engine:
            self._report(f"starting the engine with {' and '.join(settings.local_models())}")
            self._launch("engine", engine, env)
        self._report("starting the worker and the API")
        for name, slots, queues in worker_pools(settings):
            pool = {"REASONER_QUEUES": ",".join(queues), "REASONER_CONCURRENCY": str(slots)}
            self._launch(name, [sys.executable, "-m", "api.roles.serve", "worker"], env | pool)
        self._launch("api", [sys.executable, "-m", "api.roles.serve", "api"], env)
        self._await_ready()
        self._watcher.start()
        self._report(f"ready at {self.url}")

    def _launch(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        role = Role(name, command, env, self.log_dir / f"{name}.log")
        self._roles.append(role)
        role.start()

    def _await_ready(self) -> None:
        """Wait until the service is ready. Loading a large model may take any time, so only the death of a child ends
        the wait.
        """
        missing = ""
        # Never through a proxy, and without reading certificates for plain HTTP.
        with httpx.Client(timeout=5.0, trust_env=False, verify=False) as client:
            while True:
                for role in self._roles:
                    if role.exit_status is not None:
                        why = f"the {role.name} did not start; the end of {role.log}"
                        raise StartError(f"{why}:\n{role.read_log_end()}")
                with contextlib.suppress(httpx.TransportError):
                    answer = client.get(f"{self.url}/readyz")
                    if answer.status_code == httpx.codes.OK:
                        return
                    errors = describe_missing(answer.json()["errors"], broker_url(self.settings))
                    if errors != missing:
                        missing = errors
                        self._report(missing)
                time.sleep(_POLL_SECONDS)

    def _watch(self) -> None:
        """Restart children that die, until ``stop`` has stopped those that this thread may have started."""
        while not self._stopped.wait(_POLL_SECONDS):
            with self._lock:
                if self._stopping:
                    continue
                if self._broker is not None and self._broker.ended:
                    self._report("the broker ended; starting it again")
                    self._restart(self._broker)
                assert self._broker_watch is not None
                self._broker_watch.check_when_due()
                for role in self._roles:
                    status = role.exit_status
                    if status is not None and (pause := role.restart_when_due()) is not None:
                        when = f"in {pause:g} s" if pause else "at once"
                        self._report(f"the {role.name} ended with status {status}; starting it again {when}")

    def _restart(self, broker: EmbeddedBroker) -> None:
        try:
            self._start_broker(broker)
        except StartError as error:  # the other roles need the broker: report the failure and try again
            self._report(str(error))

    def _start_broker(self, broker: EmbeddedBroker) -> None:
        broker.start()
        if broker.process is None:
            self._report(
                f"sharing the broker of {broker.data_dir}, which process {broker.starter} started; when it ends, this "
                "process starts its own"
            )

    def stop(self) -> None:
        """Stop all children, each before those that it depends on. May be called again.

        A second Ctrl-C kills those that have not ended.
        """
        with uninterrupted():
            self._stop_children()
        self._signals.close()

    def _stop_children(self) -> None:
        self._stopping = True
        self._await_watcher()
        for role in self._roles:
            if role.name != "engine" and role.process is not None and role.exit_status is None:
                role.process.terminate()  # all at once: handing back jobs takes a moment
        for role in reversed(self._roles):
            role.stop()
        if self._broker is not None:
            self._broker.stop()
        self._stopped.set()
        while self._watcher.is_alive() and not is_forced():
            self._watcher.join(_POLL_SECONDS)
        if self._cleanup_process is not None:
            assert self._cleanup_process.stdin is not None
            self._cleanup_process.stdin.close()
            wait_for_exit(self._cleanup_process, timeout=STOP_SECONDS)  # it may outlive this process
            self._cleanup_process = None

    def _await_watcher(self) -> None:
        """Wait until the watcher has finished a start in progress; afterwards it starts nothing."""
        while not self._lock.acquire(timeout=_POLL_SECONDS):
            if is_forced():
                return
        self._lock.release()


def describe_missing(errors: Sequence[dict[str, str]], broker: str) -> str:
    """Return the unmet conditions of readiness. They are shown because a misconfigured model never becomes ready by
    itself. ``broker``: the URL of the broker, of which the login is left out.
    """
    address = parse_broker_url(broker).public_url
    wrong = [
        f"waiting for the broker at {address}: {part['message']}" if part["field"] == "broker" else part["message"]
        for part in errors
        if part["field"] != "engine"
    ]
    parts = [part["field"] for part in errors if part["field"] == "engine"]
    return "; ".join([*([f"waiting for the {' and the '.join(parts)}"] if parts else []), *wrong])


def worker_pools(settings: Settings) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return the worker processes of this machine: name, slots and queues of each. Together they cover all queues."""
    own = [(f"worker-{queue}", slots, (queue,)) for queue, slots in settings.pools.items()]
    rest = tuple(queue for queue in QUEUES if queue not in settings.pools)
    return [("worker", settings.concurrency, rest), *own] if rest else [*own]


ENGINE_SETTINGS = (*(name for name in ENGINE_OPTIONS if f"engine_{name}" in Settings.model_fields), "threads")
"""Options of the engine server that are also settings, there prefixed with ``engine_``."""


def engine_command(settings: Settings, where: Sequence[str]) -> list[str]:
    """Return the command line of an engine server with the configured models. Raises ``ConfigError``."""
    command = [sys.executable, "-m", "engine.server.app", *where]
    served = settings.local_models()
    if not served:
        raise ConfigError("all models have servers of their own: there is nothing to load here")
    try:
        require_engine(f"loading {' and '.join(served)} here")
    except EngineError as error:
        raise ConfigError(f"{error}, or name the server of the model by engine_url") from None
    for name, (setting, value) in served.items():
        command += ["--model", f"{name}={require_model_folder(value, setting)}"]
    command += settings.chat_template_options(served)
    command += [part for name, at in settings.adapter_folders().items() for part in ("--adapter", f"{name}={at}")]
    values = {name: getattr(settings, f"engine_{name}") for name in ENGINE_SETTINGS}
    probe = settings.probe if settings.probe in ("auto", "off") else Path(settings.probe).expanduser().absolute()
    values |= {"draft": settings.drafter, "draft_length": settings.draft_length, "probe": probe}
    for name, value in values.items():
        if value is None or value is False:
            continue
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(str(value))
    return command


def free_port() -> int:
    """Return a loopback port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_bind(settings: Settings) -> None:
    """Raise ``ConfigError`` if other machines would be served without keys. The broker must be running."""
    if not is_loopback(settings.host):
        settings.check_bind(stored_keys=has_stored_keys(broker_url(settings)))


def check_port(host: str, port: int) -> None:
    """Raise ``ConfigError`` if the port is taken or the address is not one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}): choose another port") from None


def _spawn_cleanup_process(paths: Sequence[Path]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _CLEANUP_SCRIPT, "cleanup", *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
