"""The claims about speed reject controllers that never draft, always draft, or do not rest between trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.speculation.control import adaptive as module
from engine.speculation.control.controller import Controller, FixedController
from tests.engine.speculation.control import measures
from tests.engine.speculation.control.costs import adaptive, always, lookup, small
from tests.engine.speculation.simulation import Simulation
from tests.means import assert_mean_at_least

SEEDS = range(6)


def never_draft() -> Controller:
    return FixedController(0, 0)


def always_draft() -> Controller:
    return FixedController(4, 4)


def assert_rejected(values: Sequence[float], claim: float) -> None:
    with pytest.raises(AssertionError, match="claimed"):
        assert_mean_at_least(values, claim)


def test_a_controller_that_never_drafts_is_rejected() -> None:
    alone = [Simulation(small, lookup, always(0.8), seed=seed) for seed in SEEDS]
    assert_rejected([measures.measure_share_of_the_best(never_draft, one) for one in alone], 0.94)
    assert_rejected([measures.measure_the_last_branch(never_draft, seed)[1] for seed in SEEDS], 2)


def test_a_controller_that_always_drafts_is_rejected() -> None:
    costly = [replace(measures.COSTLY["few are right"], seed=seed) for seed in SEEDS]
    speeds, drafted = zip(*(measures.measure_costly_drafts(always_draft, one) for one in costly), strict=True)
    assert_rejected(speeds, 0.98)
    assert_rejected([-share for share in drafted], -0.1)
    assert_rejected([measures.measure_many_after_few(always_draft, 0.6, seed) for seed in SEEDS], 0.98)


def test_a_controller_whose_trials_become_no_rarer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PATIENCE", 1)
    runs = [measures.measure_trials_without_gain(adaptive, 1, seed) for seed in range(12)]
    assert_rejected([one.early - 3 * one.late for one in runs], 0)
