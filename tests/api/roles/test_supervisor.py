"""Restarts of a role that has exited."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from api.roles.supervisor import LONGEST_PAUSE, STEADY_SECONDS, Role
from workers.config.settings import load_settings


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("api.roles.supervisor.time.monotonic", lambda: self.now)


def test_the_pause_doubles_with_every_exit_up_to_a_limit_and_is_zero_after_a_steady_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, role = Clock(monkeypatch), Role("worker", [sys.executable, "-c", ""], {}, tmp_path / "log")

    def dies(after: float) -> float:
        """Return the pause after the next exit, and check that the role runs again after it and not before."""
        assert role.process is not None
        role.process.wait()
        died = role.process
        clock.now += after
        pause = role.restart_when_due()
        assert pause is not None
        if pause == 0:
            assert role.process is not died
            return pause
        clock.now += pause - 0.01
        assert role.restart_when_due() is None
        assert role.process is died
        clock.now += 0.02
        assert role.restart_when_due() is None
        assert role.process is not died
        return pause

    role.start()
    try:
        assert [dies(after=1.0) for _ in range(8)] == [0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE, LONGEST_PAUSE]
        assert dies(after=STEADY_SECONDS + 1) == 0
    finally:
        role.stop()


def test_the_last_words_of_a_role_are_of_its_latest_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for words in ("the port is taken", "the model is missing", ""):
        role = Role("engine", [sys.executable, "-c", f"print({words!r})"], {}, log)
        role.start()
        assert role.process is not None
        role.process.wait()
        assert role.read_log_end() == words
    assert log.read_text().splitlines() == ["the port is taken", "the model is missing", ""]


def test_a_misconfigured_role_reports_the_error_in_one_line(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    settings = load_settings(redis_url="unix:///nowhere.sock", calibration=table)
    worker = [sys.executable, "-m", "api.roles.serve", "worker"]
    role = Role("worker", worker, os.environ | settings.environment(), tmp_path / "log")
    role.start()
    assert role.process is not None
    assert role.process.wait() == 1
    assert role.read_log_end() == f"reasoner: calibration {table}: No such file or directory"
