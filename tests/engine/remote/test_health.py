"""Health of engine replicas: probe intervals, failures and pauses."""

from __future__ import annotations

import threading

import pytest

from engine.protocol.types import EngineUnavailable, ModelInfo
from engine.remote.health import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    PROBE_INTERVAL_SECONDS,
    PROBE_OVERDUE_SECONDS,
    Health,
)

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
    assert health.get_models("a") is None
    health.record_models("a", [POLICY])
    assert (health.snapshot()[0].state, health.get_models("a")) == ("up", (POLICY,))
    health.record_failure("a", GONE)
    away = health.snapshot()[0]
    assert (away.state, away.models, away.error, health.get_models("a")) == ("away", (POLICY,), GONE, None)
    health.add("a")
    assert health.snapshot() == [away]
    health.record_models("a", [])
    assert (health.snapshot()[0].state, health.get_models("a")) == ("up", ())


def test_a_healthy_replica_is_probed_by_one_client_at_a_time_at_an_interval(health: Health, clock: Clock) -> None:
    assert health.claim_probe("a")
    assert not health.claim_probe("a")
    clock.now += PROBE_INTERVAL_SECONDS
    assert health.claim_probe("a")
    clock.now += PROBE_INTERVAL_SECONDS - 0.1
    health.record_models("a", [POLICY])
    clock.now += PROBE_INTERVAL_SECONDS - 0.1
    assert not health.claim_probe("a")
    clock.now += 0.2
    assert health.claim_probe("a")


def test_a_replica_that_stays_away_is_probed_at_growing_intervals_up_to_a_limit(health: Health, clock: Clock) -> None:
    assert health.claim_probe("a")

    def pause() -> float:
        began = clock.now
        health.record_probe_failure("a", GONE, is_silent=False)
        while not health.claim_probe("a"):
            clock.now += 0.25
        return clock.now - began

    pauses = [FIRST_PAUSE_SECONDS * 2**times for times in range(10)]
    expected = [min(MAX_PAUSE_SECONDS, max(PROBE_INTERVAL_SECONDS, longer)) for longer in pauses]
    assert [pause() for _ in range(10)] == expected


def test_concurrent_failed_requests_count_as_one_failure(health: Health, clock: Clock) -> None:
    health.record_models("a", [POLICY])
    for _ in range(100):
        health.record_failure("a", GONE)
    clock.now += max(FIRST_PAUSE_SECONDS, PROBE_INTERVAL_SECONDS)
    assert health.claim_probe("a")
    assert health.take_counts() == {("a", "failures"): 100}
    assert health.take_counts() == {}


def test_pauses_grow_while_probes_succeed_and_requests_fail_until_one_succeeds(health: Health, clock: Clock) -> None:
    for _ in range(8):
        health.record_models("a", [POLICY])
        health.record_failure("a", GONE)
    clock.now += MAX_PAUSE_SECONDS - 0.1
    assert not health.claim_probe("a")
    clock.now += 0.2
    assert health.claim_probe("a")
    health.record_models("a", [POLICY])
    health.record_success("a")
    health.record_failure("a", GONE)
    clock.now += PROBE_INTERVAL_SECONDS
    assert health.claim_probe("a")


def test_any_response_ends_the_silent_state(health: Health) -> None:
    health.record_probe_failure("a", GONE, is_silent=True)
    assert health.is_silent("a")
    health.record_probe_failure("a", GONE, is_silent=False)
    assert not health.is_silent("a")
    health.record_probe_failure("a", GONE, is_silent=True)
    health.record_models("a", [POLICY])
    assert not health.is_silent("a")


def test_counts_from_many_threads_add_up(health: Health) -> None:
    def work() -> None:
        for _ in range(500):
            health.record_success("a")
            health.record_failure("a", GONE)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert health.take_counts() == {("a", "requests"): 4000, ("a", "failures"): 4000}


def test_a_replica_with_an_overdue_probe_is_reported_as_away(health: Health, clock: Clock) -> None:
    health.record_models("a", [POLICY])
    clock.now += 60
    health.record_probe_started("a")
    clock.now += PROBE_OVERDUE_SECONDS - 0.1
    health.record_probe_started("a")
    assert health.snapshot()[0].state == "up"
    clock.now += 0.2
    away = health.snapshot()[0]
    assert (away.state, health.get_models("a")) == ("away", (POLICY,))
    assert "has not answered" in str(away.error)
    health.record_probe_ended("a")
    assert health.snapshot()[0].state == "up"
