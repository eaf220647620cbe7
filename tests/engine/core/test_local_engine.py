"""The in-process engine: one thread, any number of event loops, several models."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import (
    Branch,
    Completion,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ScoreItem,
)
from prm.formats.base import softmax
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate, score

PROMPT = tuple(range(10, 40))
OPTIONS = EngineOptions(kv_tokens=2048, max_running=8, max_waiting=24, step_tokens=256, debug=True)


@pytest.fixture
async def engine(checkpoints: Checkpoints) -> AsyncIterator[LocalEngine]:
    local = LocalEngine({"m": checkpoints("qwen3"), "other": checkpoints("llama")}, OPTIONS)
    yield local
    await local.close()


def request(key: int = 0, *, model: str = "m", count: int = 1, max_tokens: int = 12) -> GenerateRequest:
    branches = [Branch(3, key + index, max_tokens) for index in range(count)]
    return generate(PROMPT, branches, model=model, request_id=f"{model}-{key}", ignore_eos=True)


async def collect(engine: LocalEngine, wanted: GenerateRequest) -> list[Completion]:
    return [event async for event in engine.generate(wanted) if isinstance(event, Completion)]


async def test_event_loops_in_several_threads_share_one_engine(engine: LocalEngine) -> None:
    expected = {key: (await collect(engine, request(key)))[0].token_ids for key in range(4)}
    found: dict[int, tuple[int, ...]] = {}

    def in_own_loop(key: int) -> None:
        found[key] = asyncio.run(collect(engine, request(key)))[0].token_ids

    threads = [threading.Thread(target=in_own_loop, args=(key,)) for key in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert found == expected


async def test_several_models_run_concurrently(engine: LocalEngine) -> None:
    first, second = await asyncio.gather(collect(engine, request()), collect(engine, request(model="other")))
    assert first[0].token_ids != second[0].token_ids
    stats = engine.stats()
    assert stats["m"].generated_tokens == stats["other"].generated_tokens == 12


async def test_completions_arrive_as_branches_finish(engine: LocalEngine) -> None:
    branches = [Branch(3, 0, 30), Branch(3, 1, 2), Branch(3, 2, 9)]
    order = [one.index for one in await collect(engine, generate(PROMPT, branches, ignore_eos=True))]
    assert order == [1, 2, 0]


async def test_events_of_one_step_wake_an_event_loop_once(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await collect(engine, request())  # with a cached prompt all branches start, and so end, in the same step
    loop, woken = asyncio.get_running_loop(), 0
    call = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> object:
        nonlocal woken
        woken += 1
        return call(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    assert len(await collect(engine, request(key=1, count=8))) == 8
    assert woken == 1


async def test_validation_errors_are_raised_at_the_call(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequest, match="not served"):
        engine.generate(request(model="nobody"))
    with pytest.raises(InvalidRequest, match="branches"):
        engine.generate(request(count=0))
    with pytest.raises(InvalidRequest, match="items"):
        await engine.score(score(*[ScoreItem(("a",), (0,))] * 25, token_ids=(1,)))


async def test_a_full_queue_rejects_requests_until_it_drains(engine: LocalEngine) -> None:
    with pytest.raises(EngineBusy, match="try later"):
        await asyncio.gather(*(collect(engine, request(key, count=20, max_tokens=100)) for key in range(5)))
    await engine.abort("m-0")
    assert len(await collect(engine, request(count=1))) == 1


async def test_abort_returns_the_tokens_generated_so_far(engine: LocalEngine) -> None:
    events = engine.generate(request(max_tokens=200), stream=True)
    await anext(events)
    await engine.abort("m-0")
    reasons = [event.finish_reason async for event in events if isinstance(event, Completion)]
    # The branch may have ended by itself before the abort reached it.
    assert reasons in (["cancelled"], ["length"])


async def test_a_timeout_ends_a_running_request(engine: LocalEngine) -> None:
    [completion] = await collect(
        engine, generate(PROMPT, [Branch(1, 1, 200)], model="m", timeout=1e-6, ignore_eos=True)
    )
    assert completion.finish_reason == "timeout"
    assert completion.token_ids == ()


async def test_cancelling_the_task_cancels_its_request(engine: LocalEngine) -> None:
    task = asyncio.create_task(collect(engine, request(max_tokens=200, count=8)))
    scoring = asyncio.create_task(engine.score(score(ScoreItem((PROMPT * 5,), (0,)), token_ids=(1,))))
    await asyncio.sleep(0)
    task.cancel()
    scoring.cancel()
    await asyncio.gather(task, scoring, return_exceptions=True)
    assert len(await collect(engine, request(key=99))) == 1
    assert engine.stats()["m"].running == 0


async def test_clearing_the_cache_drops_unused_prefixes(engine: LocalEngine) -> None:
    await collect(engine, request())
    [warm] = await collect(engine, request())
    await engine.clear_cache()
    [cold] = await collect(engine, request())
    assert (warm.cached_tokens, cold.cached_tokens) == (len(PROMPT) - 1, 0)
    assert warm.token_ids == cold.token_ids


async def test_normalized_scores_are_the_log_probabilities_that_decoding_reports(engine: LocalEngine) -> None:
    """Bit for bit also beside other rows, whose number must not change a sum."""
    wanted = generate(PROMPT, [Branch(3, 0, 1)], temperature=0.0, logprobs=5, ignore_eos=True)
    [completion] = await collect(engine, wanted)
    assert completion.logprobs is not None
    tokens, expected = zip(*completion.logprobs[0].top, strict=True)
    items = [ScoreItem((PROMPT[:end],), (0,)) for end in (len(PROMPT), *range(3, 20))]
    for count in (1, len(items)):
        asked = replace(score(*items[:count], token_ids=tokens), normalized=True)
        [first, *_] = await engine.score(asked)
        assert first.values == (expected,)
    [raw, *_] = await engine.score(score(items[0], token_ids=tokens))
    assert raw.values is not None
    assert softmax(raw.values[0], 0) == pytest.approx(softmax(expected, 0))


async def test_a_question_behind_a_branch_computes_its_own_tokens_alone_and_scores_as_without_a_cache(
    checkpoints: Checkpoints,
) -> None:
    options = replace(OPTIONS, deterministic=True)
    engine, other = (LocalEngine({"m": checkpoints("qwen3")}, options) for _ in range(2))
    branches = [Branch(3, key, 30) for key in range(4)]
    wanted = generate(PROMPT, branches, pin_key="job", ignore_eos=True)
    answers = [PROMPT + require_ids(completion.token_ids) for completion in await collect(engine, wanted)]
    questions = [tuple(range(size, 2 * size)) for size in (7, 20)]
    items = [ScoreItem((answer + question,), (0,)) for answer in answers for question in questions]
    asked = replace(score(*items, token_ids=(1, 2, 3)), normalized=True)
    behind, whole = await engine.score(asked), await other.score(asked)
    assert [result.values for result in behind] == [result.values for result in whole]
    assert [result.computed_tokens for result in behind] == [8, 21] * 4  # the last token of a branch is not computed
    await engine.close()
    await other.close()


async def test_an_empty_score_request_returns_immediately(engine: LocalEngine) -> None:
    assert await engine.score(score(token_ids=(1,))) == []


async def test_a_closed_engine_ends_its_requests_and_rejects_new_ones(checkpoints: Checkpoints) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3")}, OPTIONS)
    events = engine.generate(request(max_tokens=200), stream=True)
    await anext(events)
    await engine.close()
    assert not engine.is_alive
    with pytest.raises(EngineUnavailable, match="closed"):
        async for _ in events:
            pass
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.generate(request())


async def test_a_broken_invariant_stops_the_engine_and_fails_all_requests(checkpoints: Checkpoints) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3"), "other": checkpoints("llama")}, OPTIONS)
    await collect(engine, request())
    events = engine.generate(request(model="other", max_tokens=200), stream=True)
    await anext(events)
    engine._cores["m"].cache.tree.num_evictable += 1
    [last] = await collect(engine, request(key=7))
    assert last.finish_reason == "length"
    with pytest.raises(EngineUnavailable, match=r"stopped.*evictable pages"):
        async for _ in events:
            pass
    await asyncio.to_thread(engine._thread.join)
    assert not engine.is_alive
    with pytest.raises(EngineUnavailable, match=r"stopped.*evictable pages"):
        await collect(engine, request())
    with pytest.raises(EngineUnavailable, match="stopped"):
        await engine.clear_cache()
    await engine.release("job")
    await engine.close()


def test_an_engine_without_models_is_rejected() -> None:
    with pytest.raises(EngineError, match="at least one model"):
        LocalEngine({})


_LEFT_AT_WORK = """
import asyncio, atexit, sys
from engine.core.local_engine import LocalEngine
from engine.protocol.types import Branch, GenerateRequest, SamplingParams

engines = []
atexit.register(lambda: print(engines[0].is_alive))  # called after what is registered later
engines.append(LocalEngine({"m": sys.argv[1]}))
request = GenerateRequest("r", "m", (1, 2, 3), (Branch(1, 0, 200),), SamplingParams(ignore_eos=True))
kept = []

async def begin():
    kept.append(engines[0].generate(request, stream=True))
    await anext(kept[0])

asyncio.new_event_loop().run_until_complete(begin())
"""


def test_a_program_that_does_not_close_its_engine_exits_cleanly(checkpoints: Checkpoints) -> None:
    command = [sys.executable, "-c", _LEFT_AT_WORK, str(checkpoints("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
