"""Waiting times and paces of branches, by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.protocol.types import Branch
from engine.scheduler.timings import Histogram
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate


def test_a_value_is_counted_in_every_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_times_are_those_of_arrival_first_step_first_token_and_end(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second passes at every look at the clock but those of the scheduler: a step looks twice, an ending once."""
    harness = Harness(checkpoints("llama"))
    clock = 100.0

    def tick() -> float:
        nonlocal clock
        clock += 1
        return clock

    events = harness.submit(generate([5, 6, 7], [Branch(1, 1, 4)], ignore_eos=True))
    harness.core._jobs[0].arrived_at = 100.0
    monkeypatch.setattr(
        "engine.core.engine_core.time", SimpleNamespace(monotonic=tick)
    )  # other threads look at the clock too
    for _ in range(4):
        before = clock
        harness.core._advance(tick())
        assert clock > before
    times = harness.core.timings
    assert len(events) == 1
    # First step at 101, its token at 102; the others at 104, 106 and 108; the end at 109.
    assert (times.queue.total, times.first_token.total) == (1.0, 2.0)
    assert times.per_token.total == pytest.approx(7 / 3)
    assert times.finished == {"length": 1}
    assert times.requests == {"generate": 1}
