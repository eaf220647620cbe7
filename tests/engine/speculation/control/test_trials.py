"""Trials of a draft size in steps of given durations: what they lose, and when they end."""

from __future__ import annotations

import pytest

from engine.speculation.control.controller import StepCost
from engine.speculation.control.cost_model import NO_DRAFT, DraftSize
from engine.speculation.control.step_cost_trials import StepCostTrial

PLAIN = 1e-3


def begin_trial() -> StepCostTrial:
    """Return a trial whose plain steps are done."""
    trial = StepCostTrial(NO_DRAFT, DraftSize(8, 8), 1, 1.0)
    while not trial.is_measuring:
        trial.add(StepCost(1, 0.0, PLAIN), 0, 0, 0.0)
    return trial


def test_a_trial_of_very_slow_drafts_ends_soon_and_counts_all_that_it_loses() -> None:
    """The time to the next trial follows from the loss."""
    trial = begin_trial()
    while not trial.is_done:
        trial.add(StepCost(9, 24 * PLAIN, PLAIN), 8, 1, 0.0)
    assert trial.steps == 3
    assert trial.lost == pytest.approx(3 * 24)


@pytest.mark.parametrize("interrupted", [0, 1, 3])
def test_an_interrupted_step_of_a_trial_ends_it_no_sooner(interrupted: int) -> None:
    """A drafter that catches up, or another program, takes the time of forty steps."""
    trial = begin_trial()
    while not trial.is_done:
        slow = 40 if trial.steps == interrupted else 0
        trial.add(StepCost(9, (0.5 + slow) * PLAIN, PLAIN), 8, 1, 0.5)
    assert trial.has_result
    assert trial.lost == pytest.approx(4)
