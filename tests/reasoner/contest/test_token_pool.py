"""The tokens that problems share: never more than there are, and each slice to the largest expected gain."""

from __future__ import annotations

import asyncio
import random

import pytest

from reasoner.budget.allocator import TokenRequest, initial_grant
from reasoner.contest.token_pool import LEAST_GAIN, TokenPool
from tests.seeds import shift


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slices_go_to_the_largest_gain_for_a_token() -> None:
    pool = TokenPool(1000, 2, {"a": 100, "b": 100, "busy": 100}, max_active=1)
    pool.open_share("busy")
    asked = [
        asyncio.create_task(pool.request("a", 100, TokenRequest(100, 0.1))),
        asyncio.create_task(pool.request("b", 100, TokenRequest(50, 0.09))),
    ]
    await settle()
    assert not any(task.done() for task in asked)
    pool.end("busy", 40)
    await settle()
    assert [task.done() for task in asked] == [False, True]
    pool.end("b", 150)
    assert await asyncio.gather(*asked) == [100, 50]
    assert pool.left == 1000 - 200 - 40 - 150


async def test_first_grants_come_before_all_others() -> None:
    pool = TokenPool(1000, 10, {"old": 100, "busy": 1}, max_active=1)
    pool.open_share("busy")
    old = asyncio.create_task(pool.request("old", 100, TokenRequest(10, 1.0)))
    new = asyncio.create_task(pool.request("new", 0, TokenRequest(10, 0.0)))
    await settle()
    pool.end("busy", 1)
    assert await new == initial_grant(1000, 10)
    assert not old.done()
    old.cancel()


async def test_a_problem_whose_answer_is_certain_gets_no_more() -> None:
    pool = TokenPool(1000, 2, {"a": 100})
    assert await pool.request("a", 100, TokenRequest(10, LEAST_GAIN / 2)) == 0
    assert await pool.request("a", 100, TokenRequest(10, LEAST_GAIN * 2)) == 10


async def test_what_a_search_did_not_need_goes_to_those_that_wait() -> None:
    pool = TokenPool(100, 2, {"a": 60, "b": 40})
    pool.open_share("a")
    waiting = asyncio.create_task(pool.request("b", 40, TokenRequest(30, 0.5)))
    await settle()
    assert not waiting.done()  # a may give back
    pool.end("a", 50)
    assert await waiting == 10
    assert await pool.request("b", 50, TokenRequest(30, 0.5)) == 0


async def test_closing_refuses_those_that_wait_and_all_that_come() -> None:
    pool = TokenPool(100, 2, {"a": 100})
    pool.open_share("a")
    waiting = asyncio.create_task(pool.request("b", 0, TokenRequest(30, 0.5)))
    await settle()
    pool.close()
    assert await waiting == 0
    pool.end("a", 10)
    assert await pool.request("c", 0, TokenRequest(30, 0.5)) == 0


@pytest.mark.parametrize("seed", range(20))
async def test_no_more_than_all_tokens_are_granted_and_nobody_waits_for_ever(seed: int) -> None:
    rng = random.Random(shift(seed))
    tokens, names = rng.randint(5, 3000), [str(number) for number in range(rng.randint(1, 30))]
    pool = TokenPool(tokens, len(names), {}, max_active=rng.randint(1, 4))
    spent = dict.fromkeys(names, 0)

    async def search(name: str) -> None:
        granted = 0
        pool.open_share(name)
        for _ in range(rng.randint(1, 20)):
            more = await pool.request(name, granted, TokenRequest(rng.randint(1, 80), rng.random()))
            granted += more
            spent[name] += rng.randint(0, more)
            if more == 0:
                break
            await asyncio.sleep(0)
        assert spent[name] <= granted
        pool.end(name, spent[name])

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(search(name))
    assert pool.left == tokens - sum(spent.values())
    assert pool.left >= 0
