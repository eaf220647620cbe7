"""Continuation of requests on another replica when one dies, turns silent or is full."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineBusy,
    EngineClient,
    EngineUnavailable,
    GenerateRequest,
    SamplingParams,
    SomeModelsAway,
    TokenizeRequest,
)
from engine.remote.failover import choose_by_rendezvous
from engine.remote.replicas import MAX_REPLICAS_TRIED, ReplicatedEngine
from tests.engine.conftest import Checkpoints
from tests.engine.remote.fleet import BRANCHES, NAMES, Engine, Fleet, completions, request, scoring
from tests.scripted import ScriptedEngine
from tests.seeds import shift


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dies_after", [0, 1, 4, 5, 9])
async def test_branches_of_a_dying_engine_equal_those_of_a_healthy_one(
    fleet: Fleet, dies_after: int, stream: bool
) -> None:
    expected = await completions(ScriptedEngine(), request())
    here, elsewhere = fleet.order()
    here.dies_after = dies_after
    seen = [event async for event in fleet.client.generate(request(), stream=stream)]
    found = sorted((event for event in seen if isinstance(event, Completion)), key=lambda one: one.index)
    assert found == expected
    if stream:  # every character and every token once, whichever engine computed it
        for completion in expected:
            deltas = [event for event in seen if isinstance(event, Delta) and event.index == completion.index]
            assert "".join(delta.text for delta in deltas) == completion.text
            assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    delivered = sum(len(asked.branches) for asked in elsewhere.requests)
    assert bool(delivered) == here.dead
    assert delivered <= len(BRANCHES)  # branches that had arrived are not requested again


async def test_a_full_engine_passes_on_one_request_and_keeps_the_job(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.refuses = EngineBusy("full")
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())
    assert elsewhere.asked["generate"] == 1
    here.refuses = None
    await completions(fleet.client, request())
    assert (here.asked["generate"], elsewhere.asked["generate"]) == (2, 1)
    assert fleet.states() == ["up", "up"]


async def test_a_recovered_engine_is_found_when_the_last_other_one_dies(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    here.dead, elsewhere.dead = False, True  # the clock has not advanced, so no probe is due
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())
    assert fleet.states() == ["up", "away"]


@pytest.mark.parametrize("seed", range(10))
async def test_every_branch_completes_while_engines_die_and_return_as_long_as_one_lives(seed: int) -> None:
    fleet, rng = Fleet(3), random.Random(shift(seed))
    expected = await completions(ScriptedEngine(), request())
    for turn in range(12):
        lives = rng.choice(list(fleet.engines))
        for name, engine in fleet.engines.items():
            engine.dead = name != lives and rng.random() < 0.3
            engine.dies_after = None if name == lives or rng.random() < 0.5 else rng.randrange(30)
        fleet.clock.now += rng.choice([0.0, 1.0, 30.0])
        wanted = [request(f"job{number}", request_id=f"{turn}-{number}") for number in range(5)]
        streams = [rng.random() < 0.5 for _ in wanted]
        found = await asyncio.gather(
            *(completions(fleet.client, one, stream=stream) for one, stream in zip(wanted, streams, strict=True))
        )
        assert found == [expected] * len(wanted)
    await fleet.client.close()


async def test_a_request_that_crashes_engines_does_not_crash_all_of_them() -> None:
    fleet = Fleet(4)
    for engine in fleet.engines.values():
        engine.dies_after = 0
    with pytest.raises(EngineUnavailable, match="dead"):
        await completions(fleet.client, request())
    assert [engine.dead for engine in fleet.order()] == [True] * MAX_REPLICAS_TRIED + [False]
    await fleet.client.close()


async def test_an_aborted_request_ends_although_its_engine_is_lost(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.dies_after = 4
    found: list[Completion | Delta] = []
    async for event in fleet.client.generate(request(), stream=True):
        if not found:
            await fleet.client.abort("r")
        found.append(event)
    assert (here.aborts, elsewhere.aborts, elsewhere.asked["generate"]) == (["r"], [], 0)
    ended = {event.index: event for event in found if isinstance(event, Completion)}
    assert set(ended) == set(range(len(BRANCHES)))
    cancelled = [event for event in ended.values() if event.finish_reason == "cancelled"]
    assert len(cancelled) >= len(BRANCHES) - 2
    for one in cancelled:
        streamed = [event for event in found if isinstance(event, Delta) and event.index == one.index]
        assert one.token_ids == sum((delta.token_ids for delta in streamed), ())
    await fleet.client.abort("r")
    await fleet.client.abort("unknown")
    assert here.aborts == ["r"]


async def test_failover_keeps_the_remaining_time_and_does_not_repeat_prompt_logprobs(
    fleet: Fleet,
) -> None:
    here, elsewhere = fleet.order()
    here.dies_after = 5
    wanted = replace(request(), timeout=1000.0, sampling=SamplingParams(prompt_logprobs=1))
    await completions(fleet.client, wanted)
    (rest,) = elsewhere.requests
    assert rest.timeout is not None
    assert 0 < rest.timeout < 1000
    (left,) = rest.branches
    missing = BRANCHES.index(left)
    assert rest.sampling.prompt_logprobs == (1 if missing == 0 else None)


async def test_a_stream_continued_with_other_output_fails_and_no_engine_is_marked_away(fleet: Fleet) -> None:
    class Rounds(Engine):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            other = tuple(replace(branch, seed=99) for branch in request.branches)
            async for event in super().generate(replace(request, branches=other), stream=stream):
                yield event

    here, elsewhere = fleet.order()
    here.dies_after = 2
    name = next(name for name, engine in fleet.engines.items() if engine is elsewhere)
    fleet.client._engines[name] = Rounds()
    with pytest.raises(EngineUnavailable, match="otherwise"):
        await completions(fleet.client, request(), stream=True)
    assert fleet.states() == ["away", "up"]


@pytest.mark.parametrize("call", ["generate", "score", "tokenize"])
async def test_pending_calls_of_a_silent_engine_go_to_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("engine.remote.replicas.PROBE_TIMEOUT_SECONDS", 0.05)
    calls: dict[str, Callable[[EngineClient], object]] = {
        "generate": lambda engine: completions(engine, request()),
        "score": lambda engine: engine.score(scoring()),
        "tokenize": lambda engine: engine.tokenize(TokenizeRequest("policy", "text")),
    }
    await fleet.client.models()
    text = fleet.order("'text'" if call == "tokenize" else "job")
    text[0].hangs = True
    asking = asyncio.ensure_future(calls[call](fleet.client))  # type: ignore[call-overload]
    await text[0].hanging.wait()
    fleet.clock.now += 60
    assert await asking == await calls[call](ScriptedEngine())  # type: ignore[misc]
    assert text[1].asked[call] == 1
    assert sorted(fleet.states()) == ["away", "up"]


async def test_a_silent_engine_is_waited_for_if_no_other_answers(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.remote.replicas.PROBE_TIMEOUT_SECONDS", 0.05)
    here, elsewhere = fleet.order()
    await fleet.client.models()
    elsewhere.dead, here.hangs = True, True
    asking = asyncio.ensure_future(completions(fleet.client, request()))
    fleet.clock.now += 60
    await fleet.health.until(lambda: fleet.states() == ["away", "away"])
    looks = fleet.health.looks
    await fleet.health.until(lambda: fleet.health.looks > looks + 10)
    assert not asking.done()
    elsewhere.dead = False
    fleet.clock.now += 60
    assert await asking == await completions(ScriptedEngine(), request())


async def test_a_list_of_models_does_not_wait_for_a_silent_engine(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.remote.replicas.GRACE_SECONDS", 0.05)
    monkeypatch.setattr("engine.remote.replicas.PROBE_TIMEOUT_SECONDS", 3600.0)
    here, elsewhere = fleet.order()
    here.hangs = True
    with pytest.raises(SomeModelsAway, match="has not answered yet") as caught:
        await fleet.client.models()
    assert (caught.value.known, caught.value.away) == (elsewhere.serves, [])  # the silent one may have others
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())


async def test_an_abandoned_request_is_closed_at_the_engine(fleet: Fleet) -> None:
    here, _ = fleet.order()
    ended = asyncio.Event()

    class Slow(Engine):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            try:
                await self.answer("generate")
                yield Delta(0, "", ())
            finally:
                ended.set()

    name = next(name for name, engine in fleet.engines.items() if engine is here)
    slow = Slow()
    fleet.client._engines[name] = slow
    await fleet.client.models()
    slow.hangs = True
    asking = asyncio.ensure_future(completions(fleet.client, request()))
    await slow.hanging.wait()
    asking.cancel()
    await asyncio.wait({asking})
    assert ended.is_set()
    assert asking.cancelled()


@pytest.mark.parametrize("stream", [False, True])
async def test_real_engines_sample_the_same_tokens_when_one_closes_midway(
    checkpoints: Checkpoints, stream: bool
) -> None:
    options = EngineOptions(kv_tokens=4096, max_running=3, step_tokens=256, deterministic=True)  # some have to wait
    engines = {name: LocalEngine({"m": checkpoints("qwen3")}, options) for name in NAMES[:2]}
    branches = tuple(Branch(5, key, 10 + 12 * key) for key in range(8))
    sampling = SamplingParams(temperature=0.9, ignore_eos=True)
    wanted = GenerateRequest("r", "m", tuple(range(10, 40)), branches, sampling, pin_key="job")
    expected = await completions(engines[NAMES[1]], replace(wanted, pin_key=None))
    await engines[NAMES[1]].clear_cache()
    client = ReplicatedEngine(engines)
    home = engines[choose_by_rendezvous(engines, "job")]
    seen: list[Completion | Delta] = []
    async for event in client.generate(wanted, stream=stream):
        if isinstance(event, Completion) and not any(isinstance(one, Completion) for one in seen):
            await home.close()
        seen.append(event)
    found = sorted((event for event in seen if isinstance(event, Completion)), key=lambda one: one.index)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.text for one in found] == [one.text for one in expected]
    if stream:
        for one in expected:
            deltas = [event for event in seen if isinstance(event, Delta) and event.index == one.index]
            assert "".join(delta.text for delta in deltas) == one.text
    await client.close()
