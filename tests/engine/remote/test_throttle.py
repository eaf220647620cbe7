"""Limits on the rate of requests, and what refusals for lack of capacity do to everybody who shares them."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from engine.protocol.types import Branch, EngineBusy
from engine.remote import throttle as throttle_module
from engine.remote.throttle import LocalThrottle, RateLimits, admitted
from tests.engine.helpers import generate
from tests.engine.remote.test_openai_compatible import chunks, collect, piece, scripted
from tests.seeds import shift


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle_module, "time", clock)
    return clock


async def test_no_window_of_a_minute_exceeds_the_limits(clock: Clock) -> None:
    dice = random.Random(shift(5))
    throttle = LocalThrottle(RateLimits(requests_per_minute=20, tokens_per_minute=3_000))
    sent: list[tuple[float, int]] = []
    for _ in range(2_000):
        tokens = dice.randint(1, 400)
        ticket, wait = await throttle.try_reserve(tokens)
        if ticket:
            sent.append((clock.now, tokens))
            await throttle.settle(ticket, 0)
            clock.now += dice.random()
        else:
            assert wait > 0
            clock.now += wait
    assert len(sent) > 500
    for start, _ in sent:
        window = [tokens for at, tokens in sent if start <= at < start + 60 - 1e-6]
        assert len(window) <= 20
        assert sum(window) <= 3_000


async def test_generated_tokens_count_and_a_large_prompt_is_left_to_the_server(clock: Clock) -> None:
    throttle = LocalThrottle(RateLimits(tokens_per_minute=100))
    ticket, _ = await throttle.try_reserve(500)
    assert ticket
    ticket, wait = await throttle.try_reserve(1)
    assert (ticket, wait) == ("", 61.0)
    clock.now += 61
    ticket, _ = await throttle.try_reserve(10)
    await throttle.settle(ticket, 85)
    assert (await throttle.try_reserve(6))[0] == ""
    assert (await throttle.try_reserve(5))[0]


async def test_a_request_waits_for_one_of_the_open_ones_to_end() -> None:
    throttle = LocalThrottle(RateLimits(concurrency=2))
    full, ended = asyncio.Event(), asyncio.Event()
    running = most = 0

    async def use() -> None:
        nonlocal running, most
        async with admitted(throttle, "/v1/completions", {"prompt": [1, 2]}):
            running += 1
            most = max(most, running)
            if running == 2:
                full.set()
            await ended.wait()
            running -= 1

    tasks = [asyncio.create_task(use()) for _ in range(5)]
    async with asyncio.timeout(10):
        await full.wait()
        ended.set()
        await asyncio.gather(*tasks)
    assert most == 2


async def test_a_refusal_pauses_all_requests_to_its_server(clock: Clock) -> None:
    throttle = LocalThrottle(RateLimits())
    answers = iter(
        [
            httpx.Response(429, headers={"Retry-After": "30"}, json={"error": {"message": "slow down"}}),
            chunks(piece("a", [7], finish_reason="length")),
        ]
    )
    client = scripted("vllm", lambda _: next(answers), throttle=throttle)
    with pytest.raises(EngineBusy, match="slow down"):
        await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert (await throttle.try_reserve(1)) == ("", 30.0)
    clock.now += 31
    [one] = await collect(client, generate((5, 6), [Branch(1, 1, 9)]))
    assert one.token_ids == (7,)
    await client.close()


async def test_only_requests_that_the_model_computes_are_counted() -> None:
    throttle = LocalThrottle(RateLimits(requests_per_minute=100))
    for path, body in (
        ("/tokenize", {"model": "m", "prompt": "a text"}),
        ("/tokenize", {"model": "m", "messages": []}),
        ("/v1/models", None),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}),
        ("/pooling", {"input": [1, 2, 3]}),
    ):
        async with admitted(throttle, path, body):
            pass
    assert sum(throttle._requests.values()) == 3
