"""Waiting times and times per token of branches, on a simulated clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.protocol.types import Branch
from engine.scheduler.timings import Histogram
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate


def test_a_value_is_counted_in_every_bucket_up_to_whose_bound_it_is() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_timings_cover_arrival_first_step_first_token_and_finish(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock except the scheduler's advances it by a second: two per step, one per finish."""
    harness = Harness(checkpoints("llama"))
    clock = 100.0

    def tick() -> float:
        nonlocal clock
        clock += 1
        return clock

    events = harness.submit(generate([5, 6, 7], [Branch(1, 1, 4)], ignore_eos=True))
    harness.core._requests[0].arrived_at = 100.0
    # Other threads read the clock too.
    monkeypatch.setattr("engine.core.engine_core.time", SimpleNamespace(monotonic=tick))
    for _ in range(4):
        before = clock
        harness.core.step()
        assert clock > before
    times = harness.core.timings
    assert len(events) == 1
    # First step at 101, its token at 102; the others at 104, 106 and 108; the finish at 109.
    assert (times.queue.total, times.first_token.total) == (1.0, 2.0)
    assert times.per_token.total == pytest.approx(7 / 3)
    assert times.finished == {"length": 1}
    assert times.requests == {"generate": 1}
