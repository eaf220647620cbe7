"""A request that makes steps fail ends alone with its error; all others have the same results as without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.core.recovery import MAX_UNEXPLAINED
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    ScoreItem,
    ScoreResult,
)
from engine.runner import batch, sample_step
from engine.runner.batch import ScheduledSequence
from engine.sampling.logits_processors import Penalties
from engine.scheduler.sequence import Event, GenerateSequence, Request
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss, gap
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.ties import count_same_tokens
from tests.long import mostly_long_grid
from tests.seeds import shift

SHARED = random.Random(shift(1)).choices(range(3, 360), k=20)
OTHER = random.Random(shift(2)).choices(range(3, 360), k=25)
POISON = "poison"
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": ((7, 2.0),)},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.1, "min_tokens": 6, "stop": ("a", "e t")},
]
HEALTHY = [
    generate(
        [*SHARED, *OTHER[:number]],
        [Branch(7, key, 9 + 2 * key) for key in range(1 + number % 3)],
        request_id=f"healthy {number}",
        pin_key=f"job {number % 2}",
        **{"ignore_eos": True, **LAWS[number % len(LAWS)]},
    )
    for number in range(6)
]
READ = score(ScoreItem((tuple(SHARED), tuple(OTHER)), (0, 1)), token_ids=(7, 8))


def poisoned(number: int = 0) -> GenerateRequest:
    law: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.2, "stop": ("zzzz",), "ignore_eos": True}
    branches = [Branch(3, 10 * number + key, 20) for key in range(2)]
    return generate(OTHER[number:], branches, request_id=f"{POISON} {number}", **law)


def fail_in_step(harness: Harness, request: Request, after: int, patch: pytest.MonkeyPatch) -> str:
    real = sample_step.sample_and_score

    def sample_and_score(work: list[ScheduledSequence], **rest: Any) -> Any:
        if any(one.sequence.request is request and written(one.sequence) >= after for one in work):
            raise RuntimeError("something broke")
        return real(work, **rest)

    patch.setattr("engine.core.step.sample_and_score", sample_and_score)
    return "something broke"


def fail_by_numbers(harness: Harness, request: Request, after: int, patch: pytest.MonkeyPatch) -> str:
    """Make its keys and values NaN, in pages that others get afterwards."""
    real = batch.build_batch

    def build_batch(work: list[ScheduledSequence], *rest: Any) -> Any:
        for sequence, *_ in work:
            if sequence.request is request and written(sequence) >= after:
                harness.core.cache.data[:, :, :, sequence.pages.pages] = torch.nan
        return real(work, *rest)

    patch.setattr("engine.core.step.build_batch", build_batch)
    return "not finite"


def fail_in_law(harness: Harness, request: Request, after: int, patch: pytest.MonkeyPatch) -> str:
    """Fail like a parameter that passed validation although it does not fit into 64 bits."""
    for sequence in generating(request):
        sequence.sampling = replace(sequence.sampling, top_k=1 << 63)
    return "OverflowError"


def fail_half_way(harness: Harness, request: Request, after: int, patch: pytest.MonkeyPatch) -> str:
    """Fail after a token was appended and before it is counted."""

    def add(self: Penalties, token: int) -> None:
        if self is chosen.penalties and written(chosen) > after:
            raise ValueError("cannot count")
        real(self, token)

    real, chosen = Penalties.add, generating(request)[-1]
    patch.setattr(Penalties, "add", add)
    return "cannot count"


def fail_in_text(harness: Harness, request: Request, after: int, patch: pytest.MonkeyPatch) -> str:
    def advance() -> None:
        if written(chosen) > after:
            raise UnicodeError("no text")
        real()

    chosen = generating(request)[0]
    real = chosen.reader.advance
    patch.setattr(chosen.reader, "advance", advance)
    return "no text"


Poison = Callable[[Harness, Request, int, pytest.MonkeyPatch], str]
POISONS: list[Poison] = [fail_in_step, fail_by_numbers, fail_in_law, fail_half_way, fail_in_text]


def written(sequence: object) -> int:
    return len(sequence.generated) if isinstance(sequence, GenerateSequence) else -1


def generating(request: Request) -> list[GenerateSequence]:
    return [sequence for sequence in request.sequences if isinstance(sequence, GenerateSequence)]


def answers(events: Sequence[Event]) -> list[Completion]:
    assert not any(isinstance(event, EngineError) for event in events), events
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


def check_same(
    folder: Path,
    request: GenerateRequest,
    ours: Sequence[Completion],
    plain: Sequence[Completion],
    *,
    exactly: bool = False,
) -> None:
    """Compare answers up to ties and the roundings of other steps, or bit for bit."""
    near = 0.0 if exactly else gap(folder)
    for branch, one, other in zip(request.branches, ours, plain, strict=True):
        assert one.token_ids == other.token_ids or not exactly
        count = count_same_tokens(folder, request, branch, one.token_ids, other.token_ids)
        if count == len(one.token_ids):
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert abs(one.logprob - other.logprob) <= count * near
        for name, most in (("logprobs", count), ("prompt_logprobs", None)):
            pairs = list(zip(getattr(one, name) or (), getattr(other, name) or (), strict=False))
            assert all(a is b is None or abs(a.logprob - b.logprob) <= near for a, b in pairs[:most])


def check_stream(events: Sequence[Event], completions: Sequence[Completion]) -> None:
    for completion in completions:
        deltas = [event for event in events if isinstance(event, Delta) and event.index == completion.index]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids


@pytest.fixture(scope="module")
def without(checkpoints: Checkpoints) -> dict[bool, list[list[Completion]]]:
    """Return the results of the healthy requests in an engine that never fails, by ``deterministic``."""
    found = {}
    for deterministic in (False, True):
        harness = Harness(checkpoints("qwen3"), replace(SMALL, deterministic=deterministic))
        found[deterministic] = [harness.complete(request) for request in HEALTHY]
    return found


@pytest.mark.parametrize(("seed", "poison"), mostly_long_grid(range(8), POISONS, every=3))
def test_a_poisoned_request_fails_alone_and_changes_no_other_result(
    checkpoints: Checkpoints,
    without: dict[bool, list[list[Completion]]],
    monkeypatch: pytest.MonkeyPatch,
    poison: Poison,
    seed: int,
) -> None:
    rng = random.Random(shift(f"{poison.__name__} {seed}"))
    deterministic = rng.random() < 0.3
    memory = rng.choice([4096, 320])  # sequences are preempted in the smaller pool
    harness = Harness(checkpoints("qwen3"), replace(SMALL, deterministic=deterministic, kv_tokens=memory))
    if rng.random() < 0.4:
        truth = {
            (branch.seed, branch.key, len(request.prompt) + place): token
            for request, completions in zip(HEALTHY, without[deterministic], strict=True)
            for branch, completion in zip(request.branches, completions, strict=True)
            for place, token in enumerate(completion.token_ids)
        }
        harness.core.start_speculation(Oracle(truth, 360, 0.8), FixedController(3, 3 if deterministic else 6))
    arrivals = {number: rng.randrange(8) for number in range(len(HEALTHY))}
    arrives, after = rng.randrange(8), rng.randrange(6)
    heard: dict[int, list[Event]] = {}
    bad: list[Event] = []
    reason = ""
    step = 0
    while len(heard) < len(HEALTHY) or not reason or harness.core.has_work:
        for number, when in arrivals.items():
            if when == step:
                heard[number] = harness.submit(HEALTHY[number], stream=number % 2 == 0)
        if arrives == step:
            bad = harness.submit(poisoned(), stream=True)
            reason = poison(harness, harness.core._requests[-1], after, monkeypatch)
        harness.core.step()
        harness.core.check_invariants()
        step += 1
    assert [event for event in bad if isinstance(event, EngineError)] == [bad[-1]]
    assert reason in str(bad[-1])
    for number, request in enumerate(HEALTHY):
        ours = answers(heard[number])
        assert len(ours) == len(request.branches)
        check_same(checkpoints("qwen3"), request, ours, without[deterministic][number], exactly=deterministic)
        if number % 2 == 0:
            check_stream(heard[number], ours)


def test_every_one_of_several_poisoned_requests_is_found(
    checkpoints: Checkpoints, without: dict[bool, list[list[Completion]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoints("qwen3"))
    bad: list[list[Event]] = []
    good: list[list[Event]] = []
    for number, request in enumerate(HEALTHY):
        bad.append(harness.submit(poisoned(number)))
        fail_in_law(harness, harness.core._requests[-1], 0, monkeypatch)
        good.append(harness.submit(request))
    scored: list[Event] = harness.submit(READ)
    harness.run()
    for events in bad:
        [error] = events
        assert "OverflowError" in str(error)
    for request, events, plain in zip(HEALTHY, good, without[False], strict=True):
        check_same(checkpoints("qwen3"), request, answers(events), plain)
    [result] = scored
    assert isinstance(result, ScoreResult)
    [expected] = Harness(checkpoints("qwen3")).score(READ)
    near = 2 * float32_loss(checkpoints("qwen3")).logit
    np.testing.assert_allclose(np.array(result.values), np.array(expected.values), atol=near, rtol=0)


def test_a_step_that_fails_once_changes_no_result(
    checkpoints: Checkpoints, without: dict[bool, list[list[Completion]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoints("qwen3"))
    heard = [harness.submit(request) for request in HEALTHY]
    for _ in range(4):
        harness.core.step()
        with monkeypatch.context() as patch:
            patch.setattr("engine.core.step.sample_and_score", lambda *_, **__: 1 / 0)
            harness.core.step()
        while harness.core._recovery.bisection is not None:
            harness.core.step()
    harness.run()
    for request, events, plain in zip(HEALTHY, heard, without[False], strict=True):
        check_same(checkpoints("qwen3"), request, answers(events), plain)


def test_an_error_in_every_step_fails_each_request_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = [harness.submit(request) for request in HEALTHY]
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.step.sample_and_score", lambda *_, **__: 1 / 0)
        harness.run()
    for events in heard:
        [error] = events
        assert "ZeroDivisionError" in str(error)
    assert len(harness.complete(HEALTHY[0])) == len(HEALTHY[0].branches)


def test_requests_that_fail_only_together_are_retried_up_to_a_limit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sample_step.sample_and_score

    def crowded(work: list[ScheduledSequence], **rest: Any) -> Any:
        if len({one.sequence.request for one in work}) > 1:
            raise MemoryError("too many")
        return real(work, **rest)

    [plain] = harness.complete(generate(SHARED, [Branch(1, 1, 5)], ignore_eos=True))
    monkeypatch.setattr("engine.core.step.sample_and_score", crowded)
    short = [harness.submit(generate(SHARED, [Branch(1, 1, 5)], ignore_eos=True)) for _ in range(2)]
    harness.run()
    assert [one.token_ids for events in short for one in answers(events)] == [plain.token_ids] * 2
    lasting = [harness.submit(generate(SHARED, [Branch(1, 1, 60)], ignore_eos=True)) for _ in range(2)]
    failures = 0
    while harness.core.has_work:
        before = harness.core._recovery.bisection
        harness.core.step()
        failures += before is None and harness.core._recovery.bisection is not None
    assert failures == MAX_UNEXPLAINED + 1
    for events in lasting:
        [error] = events
        assert "too many" in str(error)


def test_requests_that_arrive_or_are_cancelled_during_bisection_are_served(
    checkpoints: Checkpoints, without: dict[bool, list[list[Completion]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoints("qwen3"))
    first = [harness.submit(request) for request in HEALTHY[:4]]
    bad = harness.submit(poisoned())
    fail_in_law(harness, harness.core._requests[-1], 0, monkeypatch)
    harness.core.step()
    assert harness.core._recovery.bisection is not None
    waiting = sum(len(request.branches) for request in HEALTHY[2:4]) + 2
    assert harness.core.num_waiting >= waiting
    late = harness.submit(HEALTHY[4])
    timed_out = harness.submit(HEALTHY[5], deadline=0.0)
    harness.core.cancel(lambda request: request.request_id in ("healthy 1", "healthy 3"))
    harness.run()
    [error] = bad
    assert "OverflowError" in str(error)
    for number, events in {0: first[0], 2: first[2], 4: late}.items():
        check_same(checkpoints("qwen3"), HEALTHY[number], answers(events), without[False][number])
    assert {one.finish_reason for number in (1, 3) for one in answers(first[number])} == {"cancelled"}
    assert {one.finish_reason for one in answers(timed_out)} == {"timeout"}
    assert harness.core.num_waiting == 0


def test_counters_are_kept_after_a_failure(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.complete(HEALTHY[1])
    before = harness.core.stats
    harness.submit(poisoned())
    fail_in_law(harness, harness.core._requests[-1], 0, monkeypatch)
    harness.run()
    after = harness.core.stats
    assert after.prompt_tokens >= before.prompt_tokens + len(OTHER)
    assert after.cached_tokens == before.cached_tokens > 0


@pytest.fixture
def harness(checkpoints: Checkpoints) -> Harness:
    return Harness(checkpoints("qwen3"))


TOO_LARGE: dict[str, object] = {
    "top_k": 1 << 63,
    "temperature": 1e30,
    "repetition_penalty": 1e30,
    "min_tokens": 1 << 63,
    "logit_bias": tuple((token % 400, 1.0) for token in range(2000)),
    "stop_token_ids": (5,) * 500,
    "timeout": 1e300,
    "priority": 1 << 63,
}


@pytest.mark.parametrize("field", TOO_LARGE)
async def test_a_number_too_large_for_the_engine_is_rejected_before_it_runs(
    checkpoints: Checkpoints, field: str
) -> None:
    local = LocalEngine({"m": checkpoints("qwen3")}, EngineOptions(kv_tokens=1024))
    try:
        with pytest.raises(InvalidRequest, match=r"must be|at most|only") as refusal:
            local.generate(generate(SHARED, [Branch(1, 1, 3)], **{field: TOO_LARGE[field]}))  # type: ignore[arg-type]
        assert refusal.value.field == field
    finally:
        await local.close()


def test_the_largest_valid_numbers_fail_no_step(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    extremes: dict[str, Sequence[object]] = {
        "temperature": (0.0, 5e-324, 1000.0),
        "top_k": (0, 1, (1 << 31) - 1),
        "top_p": (5e-324, 1.0),
        "min_p": (0.0, 5e-324, 1.0),
        "repetition_penalty": (0.001, 1000.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "logit_bias": ((), tuple((token, 100.0) for token in range(200)), tuple((t, -100.0) for t in range(400))),
        "min_tokens": (0, 256),
        "logprobs": (None, 20),
    }
    rng = random.Random(shift(5))
    heard = []
    for key in range(40):
        law = {name: rng.choice(values) for name, values in extremes.items()}
        heard.append(harness.submit(generate(SHARED, [Branch((1 << 64) - 1, -(1 << 63) + key, 4)], **law)))
    harness.run()
    for events in heard:
        assert answers(events)
    assert not caplog.records
