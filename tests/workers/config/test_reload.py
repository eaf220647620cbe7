"""Reloading of ``reasoner.toml`` while a process runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from workers.config.reload import CHECK_INTERVAL_SECONDS, LiveSettings
from workers.config.settings import RELOADABLE, Settings, load_settings

PRICES = "[models.policy.prices]\nprompt = {}\n"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("REASONER_"):
            monkeypatch.delenv(name)
    return tmp_path / "reasoner.toml"


def prompt(settings: Settings) -> float | None:
    prices = settings.prices.get("policy")
    return None if prices is None else prices.prompt


def test_a_change_of_the_file_and_its_removal_apply_within_a_second(file: Path, clock: Clock) -> None:
    live = LiveSettings(load_settings(port=1234), clock)
    assert prompt(live.now) is None
    file.write_text(PRICES.format(1) + "[effort.low]\ntokens = 7\n[models.policy.sampling]\ntop_k = 5\n")
    assert prompt(live.now) is None  # not checked yet
    clock.now += CHECK_INTERVAL_SECONDS
    now = live.now
    assert (prompt(now), now.effort["low"].tokens, now.models["policy"].sampling.top_k) == (1, 7, 5)
    assert now.port == 1234
    clock.now += CHECK_INTERVAL_SECONDS
    assert live.now is now
    file.write_text(PRICES.format(2))
    clock.now += CHECK_INTERVAL_SECONDS
    assert (prompt(live.now), live.now.effort["low"].tokens) == (2, 5000)
    file.unlink()
    clock.now += CHECK_INTERVAL_SECONDS
    assert prompt(live.now) is None


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[models", "reasoner.toml: "),
        ("[models.policy.prices]\nprmpt = 1", "models.policy.prices.prmpt: unknown setting 'prmpt'"),
        ("budget_tokens = 0", "budget_tokens: Input should be greater than or equal to 1"),
        ("[models.policy]\nstrategy = 'clever'", "models.policy"),
    ],
)
def test_an_invalid_file_changes_nothing_until_it_is_corrected(file: Path, clock: Clock, text: str, hint: str) -> None:
    file.write_text(PRICES.format(1))
    live = LiveSettings(load_settings(), clock)
    assert live.problem is None
    file.write_text(text)
    clock.now += CHECK_INTERVAL_SECONDS
    assert prompt(live.now) == 1
    assert hint in (live.problem or "")
    clock.now += CHECK_INTERVAL_SECONDS
    assert live.problem is not None
    file.write_text(PRICES.format(3))
    clock.now += CHECK_INTERVAL_SECONDS
    assert live.problem is None
    assert prompt(live.now) == 3


def test_settings_outside_of_reloadable_keep_their_values(
    file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("port = 1001\nconcurrency = 5\n")
    monkeypatch.setenv("REASONER_BUDGET_TOKENS", "11")
    live = LiveSettings(load_settings(budget_seconds=3.0).model_copy(update={"queue_cap": 9}), clock)
    file.write_text("port = 2002\nconcurrency = 6\nbudget_tokens = 12\nbudget_seconds = 4\nqueue_cap = 10\n")
    clock.now += CHECK_INTERVAL_SECONDS
    now = live.now
    assert (now.port, now.concurrency) == (1001, 5)  # after a restart
    assert (now.budget_tokens, now.budget_seconds, now.queue_cap) == (11, 3.0, 9)  # options that override the file
    assert live.problem is None


def test_an_atomically_replaced_file_is_detected_even_with_the_same_size_and_time(file: Path, clock: Clock) -> None:
    file.write_text(PRICES.format(1))
    live = LiveSettings(load_settings(), clock)
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    other = file.with_suffix(".new")
    other.write_text(PRICES.format(2))
    os.utime(other, ns=times)
    other.replace(file)
    clock.now += CHECK_INTERVAL_SECONDS
    assert prompt(live.now) == 2


def test_every_thread_sees_a_consistent_configuration(file: Path, clock: Clock) -> None:
    file.write_text("queue_cap = 1\n" + PRICES.format(0))
    live = LiveSettings(load_settings(), clock)
    mixed: list[tuple[float | None, int]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            now = live.now
            if (prompt(now) or 0) + 1 != now.queue_cap:
                mixed.append((prompt(now), now.queue_cap))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 20):
        other = file.with_suffix(".new")
        other.write_text(f"queue_cap = {number + 1}\n" + PRICES.format(number))
        other.replace(file)
        clock.now += CHECK_INTERVAL_SECONDS
        assert prompt(live.now) == number
    done.set()
    for thread in threads:
        thread.join()
    assert mixed == []


def test_reloadable_names_exist_in_settings() -> None:
    assert set(Settings.model_fields) >= RELOADABLE
