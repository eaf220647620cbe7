"""The configuration while a process runs: an operator edits ``reasoner.toml``, and what can change changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from workers.config.settings import CONFIG_FILE, RELOADABLE, Settings, load_settings
from workers.config.types import ConfigError

LOOK_SECONDS = 1.0
"""The file is looked at no more often than this."""

log = structlog.get_logger("reasoner.settings")


class LiveSettings:
    """May be used from any thread. ``clock`` answers seconds.

    The file is looked at when somebody asks. One that cannot be used changes nothing: what held before goes on to hold,
    until the file is right. Settings that are not in ``RELOADABLE`` stay as this process began with them.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._file = Path(CONFIG_FILE).absolute()
        self._seen = self._version()
        self._looked_at = clock()
        self._problem: str | None = None

    @property
    def now(self) -> Settings:
        """The settings that hold now."""
        with self._lock:
            self._look()
            return self._settings

    @property
    def problem(self) -> str | None:
        """What is wrong with the file as it is, if it was not taken over."""
        with self._lock:
            self._look()
            return self._problem

    def _look(self) -> None:
        now = self._clock()
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        try:
            read = load_settings(**self._settings.given)
        except ConfigError as error:
            self._problem = str(error)
            log.error("configuration not taken over: the old one holds", problem=self._problem)
            return
        self._problem = None
        changed = {name for name in type(read).model_fields if getattr(read, name) != getattr(self._settings, name)}
        self._settings = self._settings.renewed({name: getattr(read, name) for name in changed & RELOADABLE})
        log.info("configuration read again", changed=sorted(changed & RELOADABLE))
        if changed - RELOADABLE:
            log.warning("settings that hold after a restart only", changed=sorted(changed - RELOADABLE))

    def _version(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
