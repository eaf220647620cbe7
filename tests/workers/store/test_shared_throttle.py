"""Limits shared by workers decide like those of one process."""

from __future__ import annotations

import random

import pytest

from engine.remote.throttle import LocalThrottle, RateLimits
from tests.seeds import shift
from workers.store.jobs import JobStore
from workers.store.shared_throttle import SharedThrottle


@pytest.mark.parametrize("seed", range(3))
async def test_shared_limits_decide_like_local_ones(store: JobStore, seed: int) -> None:
    dice = random.Random(shift(seed))
    limits = RateLimits(requests_per_minute=25, tokens_per_minute=2_500, concurrency=4)
    local = LocalThrottle(limits)
    shared = [SharedThrottle(store, "hosted", limits) for _ in range(2)]
    open_: list[tuple[str, str]] = []
    refused = 0
    for _ in range(120):
        if open_ and dice.random() < 0.5:
            mine, theirs = open_.pop(dice.randrange(len(open_)))
            generated = dice.randint(0, 50)
            await local.settle(mine, generated)
            await dice.choice(shared).settle(theirs, generated)
        tokens = dice.randint(1, 150)
        mine, expected = await local.try_reserve(tokens)
        theirs, wait = await dice.choice(shared).try_reserve(tokens)
        assert bool(mine) == bool(theirs)
        assert wait == pytest.approx(expected, abs=1.5)
        if mine:
            open_.append((mine, theirs))
        else:
            refused += 1
    assert refused > 20


async def test_a_pause_holds_for_all_and_never_becomes_shorter(store: JobStore) -> None:
    first, second = (SharedThrottle(store, "hosted", RateLimits()) for _ in range(2))
    other = SharedThrottle(store, "other", RateLimits())
    await first.pause(30)
    await second.pause(1)
    ticket, wait = await second.try_reserve(1)
    assert ticket == ""
    assert 25 < wait <= 30
    assert (await other.try_reserve(1))[0]
