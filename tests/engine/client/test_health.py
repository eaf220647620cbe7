"""When an engine counts as away, and how long it is left alone."""

from __future__ import annotations

import threading

import pytest

from engine.client.health import ANSWER_SECONDS, FIRST_PAUSE, FRESH_SECONDS, LONGEST_PAUSE, Health
from engine.protocol.types import EngineUnavailable, ModelInfo

POLICY = ModelInfo("policy", "generate", 256, 100, 1000)
GONE = EngineUnavailable("gone")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    health = Health(clock)
    health.add("a")
    return health


def test_an_engine_is_unknown_then_up_then_away_then_up(health: Health) -> None:
    assert [known.state for known in health.snapshot()] == ["unknown"]
    assert health.up("a") is None
    health.answered("a", [POLICY])
    assert (health.snapshot()[0].state, health.up("a")) == ("up", (POLICY,))
    health.failed("a", GONE)
    away = health.snapshot()[0]
    assert (away.state, away.models, away.error, health.up("a")) == ("away", (POLICY,), GONE, None)
    health.add("a")
    assert health.snapshot() == [away]
    health.answered("a", [])
    assert (health.snapshot()[0].state, health.up("a")) == ("up", ())


def test_one_that_answers_is_asked_by_one_client_at_a_time_and_not_all_the_time(health: Health, clock: Clock) -> None:
    assert health.due("a")
    assert not health.due("a")
    clock.now += FRESH_SECONDS
    assert health.due("a")
    clock.now += FRESH_SECONDS - 0.1
    health.answered("a", [POLICY])
    clock.now += FRESH_SECONDS - 0.1
    assert not health.due("a")
    clock.now += 0.2
    assert health.due("a")


def test_one_that_stays_away_is_asked_less_and_less_often_down_to_a_limit(health: Health, clock: Clock) -> None:
    assert health.due("a")

    def pause() -> float:
        began = clock.now
        health.unwell("a", GONE, silent=False)
        while not health.due("a"):
            clock.now += 0.25
        return clock.now - began

    doubled = [FIRST_PAUSE * 2**times for times in range(10)]
    assert [pause() for _ in range(10)] == [min(LONGEST_PAUSE, max(FRESH_SECONDS, longer)) for longer in doubled]


def test_requests_that_fail_together_count_as_one_failure(health: Health, clock: Clock) -> None:
    health.answered("a", [POLICY])
    for _ in range(100):
        health.failed("a", GONE)
    clock.now += max(FIRST_PAUSE, FRESH_SECONDS)
    assert health.due("a")
    assert health.take_counts() == {("a", "failures"): 100}
    assert health.take_counts() == {}


def test_one_that_says_it_is_well_and_fails_every_request_is_left_alone_longer_until_one_succeeds(
    health: Health, clock: Clock
) -> None:
    for _ in range(8):
        health.answered("a", [POLICY])
        health.failed("a", GONE)
    clock.now += LONGEST_PAUSE - 0.1
    assert not health.due("a")
    clock.now += 0.2
    assert health.due("a")
    health.answered("a", [POLICY])
    health.worked("a")
    health.failed("a", GONE)
    clock.now += FRESH_SECONDS
    assert health.due("a")


def test_silence_ends_with_the_first_word(health: Health) -> None:
    health.unwell("a", GONE, silent=True)
    assert health.silent("a")
    health.unwell("a", GONE, silent=False)
    assert not health.silent("a")
    health.unwell("a", GONE, silent=True)
    health.answered("a", [POLICY])
    assert not health.silent("a")


def test_counts_from_many_threads_add_up(health: Health) -> None:
    def work() -> None:
        for _ in range(500):
            health.worked("a")
            health.failed("a", GONE)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert health.take_counts() == {("a", "requests"): 4000, ("a", "failures"): 4000}


def test_one_that_was_asked_and_has_not_answered_is_away_to_those_who_want_to_know(
    health: Health, clock: Clock
) -> None:
    health.answered("a", [POLICY])
    clock.now += 60
    health.asking("a")
    clock.now += ANSWER_SECONDS - 0.1
    health.asking("a")
    assert health.snapshot()[0].state == "up"
    clock.now += 0.2
    away = health.snapshot()[0]
    assert (away.state, health.up("a")) == ("away", (POLICY,))
    assert "has not answered" in str(away.error)
    health.asked("a")
    assert health.snapshot()[0].state == "up"
