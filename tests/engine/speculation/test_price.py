"""Drafting costs reported to the controller, on a clock that only the timed parts advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.protocol.types import Branch
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, DraftOutcome, StepCost
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate

SIZES, PROPOSE, ADVANCE, LEARN = 1.0, 10.0, 0.5, 2.0


class Clock:
    """A clock in seconds, advanced by hand."""

    now = 0.0


class Slow:
    """A drafter whose drafts are empty, and its controller; each call takes a fixed time."""

    kind = "slow"
    key_shapes: tuple[HeadShape, ...] = ()
    observed_layers: tuple[int, ...] = ()

    def __init__(self, clock: Clock, hidden_state_needs: HiddenStateNeeds, depth: int, rest: int = 0) -> None:
        self.hidden_state_needs = hidden_state_needs
        self.prices: list[float] = []
        self.looks = self.told = 0
        """Number of steps that the controller measured, and that the drafter observed."""
        self._clock, self._depth, self._rest = clock, depth, rest

    def reset(self, cache: KVCache) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        self._clock.now += PROPOSE
        return [EMPTY_DRAFT] * len(wishes)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        self._clock.now += ADVANCE
        self.told += 1

    def choose_sizes(self, sequences: Sequence[GenerateSequence], _: int, _rested: int, /) -> list[tuple[int, int]]:
        self._clock.now += SIZES
        self.looks += 1
        return [(self._depth, self._depth)] * len(sequences)

    def trim(self, _: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        return list(drafts)

    def update(self, _outcomes: Sequence[DraftOutcome], cost: StepCost, /) -> int:
        self._clock.now += LEARN
        self.prices.append(cost.drafting_seconds)
        return self._rest

    def release(self, sequence: GenerateSequence) -> None:
        pass

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("hidden_state_needs", "depth", "price"),
    [
        (HiddenStateNeeds.ALL, 0, ADVANCE + SIZES / (1 + MAX_SKIPPED_STEPS)),
        (HiddenStateNeeds.LAST, 0, (ADVANCE + SIZES) / (1 + MAX_SKIPPED_STEPS)),
        (HiddenStateNeeds.NONE, 0, (ADVANCE + SIZES) / (1 + MAX_SKIPPED_STEPS)),
        (HiddenStateNeeds.LAST, 3, PROPOSE + ADVANCE + SIZES),
    ],
)
def test_the_cost_of_a_measured_step_is_spread_over_the_skipped_steps(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    hidden_state_needs: HiddenStateNeeds,
    depth: int,
    price: float,
) -> None:
    clock = Clock()
    harness = Harness(checkpoints("qwen3"))
    monkeypatch.setattr("engine.speculation.speculator.time", SimpleNamespace(thread_time=lambda: clock.now))
    slow = Slow(clock, hidden_state_needs, depth)
    harness.core.start_speculation(slow, slow)
    harness.complete(generate([1, 2, 3], [Branch(1, 1, 12)], ignore_eos=True))
    assert len(slow.prices) > 5
    assert slow.prices[1:-1] == pytest.approx([price] * (len(slow.prices) - 2))


class Restful(Slow):
    """A controller that measures every fourth step and skips the others."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, HiddenStateNeeds.NONE, 0)
        self.rested: list[int] = []

    def choose_sizes(self, sequences: Sequence[GenerateSequence], _: int, rested: int, /) -> list[tuple[int, int]]:
        self.rested.append(rested)
        return [(0, 0)] * len(sequences)

    def update(self, _outcomes: Sequence[DraftOutcome], _cost: StepCost, /) -> int:
        return 3


def test_skipping_lasts_as_requested_and_ends_when_the_batch_size_changes(checkpoints: Checkpoints) -> None:
    harness, restful = Harness(checkpoints("qwen3")), Restful(Clock())
    harness.core.start_speculation(restful, restful)
    harness.complete(generate([1, 2, 3], [Branch(1, 1, 14), Branch(1, 2, 6)], ignore_eos=True))
    # The second branch ends in the second measured step, which also ends the skipping after it.
    assert restful.rested == [0, 3, 0, 3]


@pytest.mark.parametrize(
    ("hidden_state_needs", "told"), [(HiddenStateNeeds.ALL, 12), (HiddenStateNeeds.LAST, 6), (HiddenStateNeeds.NONE, 4)]
)
def test_skipped_steps_reach_the_drafter_that_observes_but_not_the_controller(
    checkpoints: Checkpoints, hidden_state_needs: HiddenStateNeeds, told: int
) -> None:
    """The controller measures one in four of eleven steps after the prompt's."""
    slow = Slow(Clock(), hidden_state_needs, 0, rest=3)
    harness = Harness(checkpoints("qwen3"))
    harness.core.start_speculation(slow, slow)
    harness.complete(generate([1, 2, 3], [Branch(1, 1, 12)], ignore_eos=True))
    assert (slow.looks, len(slow.prices), slow.told) == (3, 3, told)
