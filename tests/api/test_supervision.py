"""When a role that died is started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from api.supervisor import LONGEST_PAUSE, STEADY_SECONDS, Role


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("api.supervisor.time.monotonic", lambda: self.now)


def test_the_pause_doubles_with_every_death_up_to_a_limit_and_is_short_again_after_a_steady_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, role = Clock(monkeypatch), Role("worker", [sys.executable, "-c", ""], {}, tmp_path / "log")

    def dies(after: float) -> float:
        """The pause that its next death makes, at whose end it runs again, and not before."""
        assert role.process is not None
        role.process.wait()
        clock.now += after
        pause = role.restart_when_due()
        assert pause is not None
        died = role.process
        clock.now += pause - 0.01
        assert role.restart_when_due() is None
        assert role.process is died
        clock.now += 0.02
        assert role.restart_when_due() is None
        assert role.process is not died
        return pause

    role.start()
    try:
        assert [dies(after=1.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE, LONGEST_PAUSE]
        assert dies(after=STEADY_SECONDS + 1) == 0.5
    finally:
        role.stop()
