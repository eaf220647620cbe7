"""Replicated engines: routing, failover, silent replicas and changed checkpoints."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from scipy.stats import chisquare

from engine.client.failover import choose_by_rendezvous
from engine.client.health import Health
from engine.client.replicas import MAX_REPLICAS_TRIED, ReplicatedEngine
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineBusy,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
)
from tests.engine.conftest import Checkpoints
from tests.scripted import ScriptedEngine

NAMES = tuple(f"http://engine{number}:8100" for number in range(4))
BRANCHES = tuple(Branch(3, key, 40) for key in range(6))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched(Health):
    """Notifies a test of every change and every access by the client."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.looks = 0
        self.news = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def is_silent(self, name: str) -> bool:
        self.looks += 1
        self.news.set()
        return super().is_silent(name)


class Engine(ScriptedEngine):
    """Engine that can be full, dead or silent, or serve other models; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.serves = [ModelInfo("policy", "generate", 256, 100, 1000), ModelInfo("prm", "classify", 256, 100, 1000)]
        self.dead = False
        self.hangs = False
        self.refuses: EngineError | None = None
        self.dies_after: int | None = None
        self.asked: Counter[str] = Counter()
        self.hanging = asyncio.Event()
        self.closed = False
        self.aborts: list[str] = []
        self.released: list[str] = []

    async def answer(self, kind: str) -> None:
        self.asked[kind] += 1
        if self.hangs:
            if kind != "models":
                self.hanging.set()
            await asyncio.Event().wait()
        if self.dead:
            raise EngineUnavailable("dead")

    async def models(self) -> list[ModelInfo]:
        await self.answer("models")
        return self.serves

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        await self.answer("generate")
        if self.refuses is not None:
            raise self.refuses
        async for event in super().generate(request, stream=stream):
            await self.count()
            if stream and isinstance(event, Completion):
                middle = len(event.token_ids) // 2
                cut = len(event.text) // 3  # other boundaries of texts and tokens
                yield Delta(event.index, event.text[:cut], event.token_ids[:middle])
                await self.count()
                yield Delta(event.index, event.text[cut:], event.token_ids[middle:])
                await self.count()
            yield event

    async def count(self) -> None:
        if self.dies_after is not None:
            self.dead = self.dead or self.dies_after == 0
            self.dies_after -= 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise EngineUnavailable("dead")

    async def score(self, request):  # type: ignore[no-untyped-def]
        await self.answer("score")
        return await super().score(request)

    async def tokenize(self, model, text, *, special=True, generation_prompt=True):  # type: ignore[no-untyped-def]
        await self.answer("tokenize")
        return await super().tokenize(model, text)

    async def abort(self, request_id: str) -> None:
        await self.answer("abort")
        self.aborts.append(request_id)
        await super().abort(request_id)

    async def release(self, lease, tokens=None):  # type: ignore[no-untyped-def]
        await self.answer("release")
        self.released.append(lease)
        await super().release(lease, tokens)

    async def close(self) -> None:
        self.closed = True


class Fleet:
    """A client, its engines, and a clock that a test advances."""

    def __init__(self, count: int = 2) -> None:
        self.clock = Clock()
        self.engines = {name: Engine() for name in NAMES[:count]}
        self.health = Watched(self.clock)
        self.client = ReplicatedEngine(self.engines, self.health)

    def order(self, lease: str = "job") -> list[Engine]:
        """Return the engines in the order of preference for a lease."""
        left, order = set(self.engines), []
        while left:
            order.append(choose_by_rendezvous(left, lease))
            left.remove(order[-1])
        return [self.engines[name] for name in order]

    def states(self) -> list[str]:
        known = {one.name: one.state for one in self.health.snapshot()}
        return [known[next(name for name, engine in self.engines.items() if engine is one)] for one in self.order()]


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("engine.client.replicas.WATCH_INTERVAL_SECONDS", 0.01)
    fleet = Fleet()
    yield fleet
    await fleet.client.close()


def request(lease: str = "job", *, request_id: str = "r", branches: tuple[Branch, ...] = BRANCHES) -> GenerateRequest:
    return GenerateRequest(request_id, "policy", (7, 8, 9), branches, lease=lease)


def scoring(lease: str | None = "job") -> ScoreRequest:
    return ScoreRequest("s", "prm", (ScoreItem(((1,), (2,)), (1,)),), lease=lease)


async def completions(engine: EngineClient, wanted: GenerateRequest, *, stream: bool = False) -> list[Completion]:
    events = [event async for event in engine.generate(wanted, stream=stream)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


# Routing.


def test_every_engine_is_first_choice_for_its_share_of_keys() -> None:
    keys = [f"job_{number}" for number in range(20_000)]
    counts = Counter(choose_by_rendezvous(NAMES, key) for key in keys)
    assert chisquare([counts[name] for name in NAMES]).pvalue > 0.001


def test_removing_an_engine_moves_only_its_own_keys_and_list_order_does_not_matter() -> None:
    keys = [f"job_{number}" for number in range(2_000)]
    before = {key: choose_by_rendezvous(NAMES, key) for key in keys}
    assert {key: choose_by_rendezvous(reversed(NAMES), key) for key in keys} == before
    after = {key: choose_by_rendezvous(NAMES[1:], key) for key in keys}
    assert [key for key in keys if before[key] != after[key]] == [key for key in keys if before[key] == NAMES[0]]
    assert len({after[key] for key in keys if before[key] == NAMES[0]}) == len(NAMES) - 1


async def test_all_requests_of_a_job_go_to_one_engine_and_jobs_are_spread(fleet: Fleet) -> None:
    for number in range(40):
        lease = f"job{number}"
        for turn in range(3):
            await completions(fleet.client, request(lease, request_id=f"{lease}-{turn}"))
        await fleet.client.score(scoring(lease))
        here, elsewhere = fleet.order(lease)
        assert lease in here.leases
        assert lease not in elsewhere.leases
    assert all(len(engine.leases) >= 8 for engine in fleet.engines.values())  # of 40: p < 1e-4 to be wrong, and fixed


async def test_a_lease_is_released_only_on_the_engines_that_saw_it(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    await completions(fleet.client, request())
    await fleet.client.release("job", (7, 8, 9, 1))
    await fleet.client.release("job")
    await fleet.client.release("job")
    assert (here.released, here.leases, elsewhere.asked["release"]) == (["job", "job"], set(), 0)


async def test_a_request_goes_to_an_engine_that_serves_its_model(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.serves = [replace(elsewhere.serves[0], id="large")]
    assert sorted(info.id for info in await fleet.client.models()) == ["large", "policy", "prm"]
    await completions(fleet.client, request())
    await fleet.client.score(scoring())
    await completions(fleet.client, replace(request(), model="large"))
    assert (here.asked["generate"], elsewhere.asked["generate"], elsewhere.asked["score"]) == (1, 1, 1)


async def test_a_refused_request_is_not_retried_on_another_engine(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.refuses = InvalidRequest("never", "prompt")
    with pytest.raises(InvalidRequest, match="never"):
        await completions(fleet.client, request())
    assert elsewhere.asked["generate"] == 0
    assert fleet.states() == ["up", "up"]


async def test_a_different_checkpoint_under_the_same_name_is_not_used_for_failover(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    meant, other = fleet.engines.values()
    other.serves = [replace(info, fingerprint="another") for info in other.serves]
    assert await fleet.client.models() == meant.serves
    for number in range(8):
        await completions(fleet.client, request(f"job{number}"))
    assert (meant.asked["generate"], other.asked["generate"]) == (8, 0)
    assert "serves another 'policy'" in caplog.text
    meant.dead = True
    with pytest.raises(EngineUnavailable, match="dead"):
        await completions(fleet.client, request())
    assert other.asked["generate"] == 0


# Failover.


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


async def test_an_engine_that_is_away_gets_no_requests_and_its_jobs_return_afterwards(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    assert (fleet.states(), elsewhere.asked["generate"]) == (["away", "up"], 1)
    failed = here.asked.copy()
    await completions(fleet.client, request())
    await fleet.client.score(scoring())
    assert here.asked == failed
    here.dead = False
    fleet.clock.now += 60
    await fleet.client.models()
    assert fleet.states() == ["up", "up"]
    await completions(fleet.client, request())
    assert here.asked["generate"] == failed["generate"] + 1


async def test_an_engine_that_is_away_is_probed_in_the_background(fleet: Fleet) -> None:
    here, _ = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    here.dead = False
    fleet.clock.now += 60
    await fleet.health.until(lambda: fleet.states() == ["up", "up"])


async def test_clients_of_one_process_share_health_state(fleet: Fleet) -> None:
    here, _ = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    failed = here.asked.copy()
    second = ReplicatedEngine(fleet.engines, fleet.health)
    await second.models()
    await completions(second, request())
    await second.close()
    assert here.asked == failed


async def test_a_full_engine_passes_on_one_request_and_keeps_the_job(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.refuses = EngineBusy("full")
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())
    assert elsewhere.asked["generate"] == 1
    here.refuses = None
    await completions(fleet.client, request())
    assert (here.asked["generate"], elsewhere.asked["generate"]) == (2, 1)
    assert fleet.states() == ["up", "up"]


async def test_when_all_engines_are_away_the_error_lists_each_and_a_recovered_one_is_used_at_once(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.dead = True
    with pytest.raises(EngineUnavailable, match="dead; dead"):
        await fleet.client.models()
    with pytest.raises(EngineUnavailable):
        await completions(fleet.client, request())
    _, elsewhere = fleet.order()
    elsewhere.dead = False
    assert len(await completions(fleet.client, request())) == len(BRANCHES)  # the clock has not advanced


async def test_a_recovered_engine_is_found_when_the_last_other_one_dies(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    here.dead, elsewhere.dead = False, True  # the clock has not advanced, so no probe is due
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())
    assert fleet.states() == ["up", "away"]


@pytest.mark.parametrize("seed", range(10))
async def test_every_branch_completes_while_engines_die_and_return_as_long_as_one_lives(seed: int) -> None:
    fleet, rng = Fleet(3), random.Random(seed)
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


async def test_misconfigured_engines_are_an_error_and_not_unavailable(fleet: Fleet) -> None:
    async def misconfigured() -> list[ModelInfo]:
        raise EngineError("name the folder of its tokenizer")

    for engine in fleet.engines.values():
        engine.models = misconfigured  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="folder") as caught:
        await fleet.client.models()
    assert not isinstance(caught.value, EngineUnavailable)


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


# Silent replicas.


@pytest.mark.parametrize("call", ["generate", "score", "tokenize"])
async def test_pending_calls_of_a_silent_engine_go_to_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("engine.client.replicas.PROBE_TIMEOUT_SECONDS", 0.05)
    calls: dict[str, Callable[[EngineClient], object]] = {
        "generate": lambda engine: completions(engine, request()),
        "score": lambda engine: engine.score(scoring()),
        "tokenize": lambda engine: engine.tokenize("policy", "text"),
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
    monkeypatch.setattr("engine.client.replicas.PROBE_TIMEOUT_SECONDS", 0.05)
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
    monkeypatch.setattr("engine.client.replicas.GRACE_SECONDS", 0.05)
    monkeypatch.setattr("engine.client.replicas.PROBE_TIMEOUT_SECONDS", 3600.0)
    here, elsewhere = fleet.order()
    here.hangs = True
    assert await fleet.client.models() == elsewhere.serves
    assert await completions(fleet.client, request()) == await completions(ScriptedEngine(), request())


# Closing.


async def test_closing_ends_every_task_and_closes_every_engine(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.hangs = True
    await elsewhere.tokenize("policy", "x")
    listing = asyncio.ensure_future(fleet.client.models())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    listing.cancel()
    await fleet.client.close()
    await asyncio.wait({listing})
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert here.closed
    assert elsewhere.closed


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


# Real engines.


@pytest.mark.parametrize("stream", [False, True])
async def test_real_engines_sample_the_same_tokens_when_one_closes_midway(
    checkpoints: Checkpoints, stream: bool
) -> None:
    options = EngineOptions(kv_tokens=4096, max_running=3, step_tokens=256, deterministic=True)  # some have to wait
    engines = {name: LocalEngine({"m": checkpoints("qwen3")}, options) for name in NAMES[:2]}
    branches = tuple(Branch(5, key, 10 + 12 * key) for key in range(8))
    sampling = SamplingParams(temperature=0.9, ignore_eos=True)
    wanted = GenerateRequest("r", "m", tuple(range(10, 40)), branches, sampling, lease="job")
    expected = await completions(engines[NAMES[1]], replace(wanted, lease=None))
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
