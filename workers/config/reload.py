"""Reloading of ``reasoner.toml`` while a process runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from workers.config.explain import CONFIG_FILE
from workers.config.settings import RELOADABLE, Settings, load_settings
from workers.config.types import ConfigError

CHECK_INTERVAL_SECONDS = 1.0
"""The minimum time between two checks of the file."""

log = structlog.get_logger("reasoner.settings")


def _list_endpoints(settings: Settings) -> dict[str, Any]:
    """Return where models are served; while a process runs, models stay where they are."""
    return {name: profile.place for name, profile in settings.models.items() if any(profile.place)}


class LiveSettings:
    """Settings that follow changes of the file. Safe to use from several threads; ``clock`` returns seconds.

    The file is checked on access. An invalid file changes nothing until it is corrected. Settings outside of
    ``RELOADABLE`` keep the values with which the process started.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._file = Path(CONFIG_FILE).absolute()
        self._seen = self._read_version()
        self._checked_at = clock()
        self._problem: str | None = None

    @property
    def now(self) -> Settings:
        """The current settings."""
        with self._lock:
            self._check_file()
            return self._settings

    @property
    def problem(self) -> str | None:
        """The error of the present file; ``None`` if it is valid."""
        with self._lock:
            self._check_file()
            return self._problem

    def _check_file(self) -> None:
        now = self._clock()
        if now < self._checked_at + CHECK_INTERVAL_SECONDS:
            return
        self._checked_at = now
        version = self._read_version()
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
        reloaded = changed & RELOADABLE
        if _list_endpoints(read) != _list_endpoints(self._settings):
            reloaded -= {"models", "names"}  # which may stand for a model that is served after a restart only
        self._settings = self._settings.renewed({name: getattr(read, name) for name in reloaded})
        log.info("configuration read again", changed=sorted(reloaded))
        if changed - reloaded:
            log.warning("settings that hold after a restart only", changed=sorted(changed - reloaded))

    def _read_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
