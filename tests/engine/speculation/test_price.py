"""What guessing is said to cost beside a step, on a clock that only the parts that are timed move."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor

from engine.cache.kv import KVCache
from engine.sequence import GenerateSequence
from engine.speculation.controller import REST, Outcome
from engine.speculation.draft import EMPTY, Advance, Draft, Watch, Wish
from engine.types import Branch
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate

SIZES, PROPOSE, ADVANCE, LEARN = 1.0, 10.0, 0.5, 2.0


class Clock:
    """Seconds."""

    now = 0.0


class Slow:
    """A drafter that never has guesses, and its controller."""

    kind = "slow"
    layers = 0
    least = 0.0

    def __init__(self, clock: Clock, watches: Watch, depth: int) -> None:
        self.watches = watches
        self.prices: list[float] = []
        self._clock, self._depth = clock, depth

    def reset(self, cache: KVCache) -> None:
        pass

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        self._clock.now += PROPOSE
        return [EMPTY] * len(wishes)

    def advance(self, steps: Sequence[Advance], hidden: Tensor) -> None:
        self._clock.now += ADVANCE

    def sizes(self, sequences: Sequence[GenerateSequence], _: int, /) -> list[tuple[int, int]]:
        self._clock.now += SIZES
        return [(self._depth, self._depth)] * len(sequences)

    def trim(self, _: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        return list(drafts)

    def learn(self, _outcomes: Sequence[Outcome], _tokens: int, drafting: float, _step: float, _first: bool, /) -> int:
        self._clock.now += LEARN
        self.prices.append(drafting)
        return 0

    def forget(self, sequence: GenerateSequence) -> None:
        pass

    def clear_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("watches", "depth", "price"),
    [
        (Watch.ALL, 0, ADVANCE + (SIZES + LEARN) / (1 + REST)),
        (Watch.LAST, 0, (ADVANCE + SIZES + LEARN) / (1 + REST)),
        (Watch.NONE, 0, (ADVANCE + SIZES + LEARN) / (1 + REST)),
        (Watch.LAST, 3, PROPOSE + ADVANCE + SIZES + LEARN),
    ],
)
def test_looking_at_a_step_without_guesses_is_paid_by_all_those_that_are_not_looked_at(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, watches: Watch, depth: int, price: float
) -> None:
    clock = Clock()
    harness = Harness(checkpoints("qwen3"))
    monkeypatch.setattr("engine.speculation.speculator.time", SimpleNamespace(thread_time=lambda: clock.now))
    slow = Slow(clock, watches, depth)
    harness.core.speculate(slow, slow)
    harness.complete(generate([1, 2, 3], [Branch(1, 1, 12)], ignore_eos=True))
    assert len(slow.prices) > 5
    assert slow.prices[1:-1] == pytest.approx([price] * (len(slow.prices) - 2))
