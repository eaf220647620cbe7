"""A folder for one engine's files, which nobody else reads and which does not outlive it.

Keys and values tell what was said, so the folder is readable by its user alone (0700), and it is removed when the
engine ends. A process that is killed leaves its folder behind; the next engine on the same disk removes it: the lock of
a living engine is held, the lock of a dead one is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path

from engine.protocol.types import EngineError

_log = logging.getLogger(__name__)

_PREFIX = "reasoner-cache-"
_LOCK = ".lock"
GIB = 1 << 30


class RunFolder:
    """A new folder within ``parent``, and its lock."""

    def __init__(self, parent: Path) -> None:
        """Remove what dead engines left, and create the folder. Raises ``EngineError`` if that is not possible."""
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(parent)
            self._lock_path, self._lock = _create_lock(parent)
            self.path = self._lock_path.with_suffix("")
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise _explain(parent, error) from None

    def remove(self) -> None:
        """Remove the folder with all files, and unlock it. What cannot be removed is left for the next engine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.path.exists():
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def check_folder(parent: Path, num_bytes: int) -> None:
    """Raise ``EngineError`` unless files of ``num_bytes`` can be written to a folder, which is created if missing."""
    folder = RunFolder(parent)
    try:
        (folder.path / "probe").write_bytes(b"\0" * 4096)
        free = shutil.disk_usage(folder.path).free
    except OSError as error:
        raise _explain(parent, error) from None
    finally:
        folder.remove()
    if free < num_bytes:
        raise EngineError(
            f"cache_disk {str(parent)!r} has {free / GIB:.1f} GiB free, and cache_disk_gb is {num_bytes / GIB:g}: "
            "choose fewer, or a larger disk"
        )


def _explain(parent: Path, error: OSError) -> EngineError:
    reason = "it is not a folder" if parent.exists() and not parent.is_dir() else error.strerror
    return EngineError(
        f"cache_disk {str(parent)!r} must be a folder on a disk with room that this user may write to: {reason}"
    )


def _create_lock(parent: Path) -> tuple[Path, int]:
    """Create and lock a file whose name nobody has. An engine that looks for leftovers may take it before."""
    while True:
        path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}{_LOCK}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        if _try_lock(descriptor) and path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # of another user, or removed meanwhile
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid() and _try_lock(descriptor):
                folder = lock.with_suffix("")
                if folder.exists() and stat.S_ISDIR(folder.lstat().st_mode):
                    shutil.rmtree(folder)
                    _log.info("the files of an engine that was killed are removed: %s", folder)
                lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
