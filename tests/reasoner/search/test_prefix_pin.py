"""A job's cache lease: named by every request, released however a job ends, and never a cause of failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from engine.protocol.types import (
    Completion,
    Delta,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ScoreRequest,
    ScoreResult,
)
from reasoner.jobs.journal import Entry, JobCancelled, LeaseLost, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING


def spec(strategy: str, **more: object) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 8}
    return build_spec({"problem": "how?", "seed": 2, "strategy": {"name": strategy} | params} | more)


class Watched(ScriptedEngine):
    """Engine that records the lease of every request and the released branches."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.named: list[str | None] = []
        self.released: list[str] = []

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        self.named.append(request.pin_key)
        return super().generate(request, stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.named.append(request.pin_key)
        return await super().score(request)

    async def release(self, pin_key: str, tokens: Sequence[int] | None = None) -> None:
        await super().release(pin_key, tokens)
        if tokens is None:
            self.released.append(pin_key)


@pytest.mark.parametrize("strategy", WRITING)
async def test_every_request_names_the_job_and_its_end_releases_the_pins_once(strategy: str) -> None:
    engine, journal = Watched(), MemoryJournal()
    await run_job(spec(strategy), engine, journal)
    assert set(engine.named) == {journal.job_id}
    assert engine.released == [journal.job_id]
    assert not engine.pin_keys


async def test_a_job_ended_by_its_budget_releases_its_pins() -> None:
    engine = Watched()
    await run_job(spec("beam", budget={"tokens": 40}), engine, MemoryJournal())
    assert len(engine.released) == 1
    assert not engine.pin_keys


async def test_a_cancelled_job_releases_its_pins_after_its_last_request() -> None:
    class Cancelling(Watched):
        def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
            cancelled.set()
            return super().generate(request, stream=stream)

    cancelled, engine = asyncio.Event(), Cancelling()
    with pytest.raises(JobCancelled):
        await run_job(spec("self_consistency"), engine, MemoryJournal(), cancelled=cancelled)
    assert len(engine.released) == 1
    assert not engine.pin_keys


@pytest.mark.parametrize("error", [EngineError("out of order"), InvalidRequest("no", "model"), ValueError("a bug")])
async def test_a_failed_job_releases_its_pins(error: Exception) -> None:
    class Failing(Watched):
        async def score(self, request: ScoreRequest) -> list[ScoreResult]:
            await super().score(request)
            raise error

    engine = Failing()
    with pytest.raises(type(error)):
        await run_job(spec("beam"), engine, MemoryJournal())
    assert len(engine.released) == 1
    assert not engine.pin_keys


async def test_a_job_refused_before_the_first_request_releases_its_pins() -> None:
    engine = Watched()
    with pytest.raises(InvalidRequest):
        await run_job(spec("greedy", problem="x" * 300), engine, MemoryJournal())
    assert len(engine.released) == 1


async def test_a_job_that_another_attempt_continues_keeps_its_pins() -> None:
    class Stolen(MemoryJournal):
        async def append(self, entries: Sequence[Entry]) -> None:
            raise LeaseLost("another worker has it")

    class Hanging(Watched):
        async def score(self, request: ScoreRequest) -> list[ScoreResult]:
            running.cancel()
            return await super().score(request)

    away, stolen, stopped = Watched(die_after=5), Watched(), Hanging()
    with pytest.raises(EngineUnavailable):
        await run_job(spec("beam"), away, MemoryJournal())
    with pytest.raises(LeaseLost):
        await run_job(spec("beam"), stolen, Stolen())
    running = asyncio.ensure_future(run_job(spec("beam"), stopped, MemoryJournal()))
    with pytest.raises(asyncio.CancelledError):
        await running
    for engine in (away, stolen, stopped):
        assert engine.released == []
        assert len(engine.pin_keys) == 1


async def test_pruned_branches_are_released_by_all_their_tokens() -> None:
    engine, journal = Watched(), MemoryJournal()
    await run_job(spec("beam"), engine, journal)
    prompt = engine.requests[0].prompt
    ids = {entry.data["node"]: tuple(entry.data["token_ids"]) for entry in journal.entries if entry.type == "node"}

    def tokens(node: str) -> tuple[int, ...]:
        path = node.split(".")
        return prompt + sum((ids[".".join(path[:end])] for end in range(1, len(path) + 1)), ())

    pruned = [node for entry in journal.entries if entry.type == "prune" for node in entry.data["nodes"]]
    # The end of the job releases everything at once, so the last of them need no call of their own.
    assert 0 < len(engine.pruned) <= len(pruned)
    assert engine.pruned == [(journal.job_id, tokens(node)) for node in pruned[: len(engine.pruned)]]
    replayed = Watched()
    await run_job(spec("beam"), replayed, MemoryJournal(journal.entries))
    assert replayed.pruned == []


async def test_an_engine_that_cannot_release_does_not_fail_the_job() -> None:
    class Deaf(ScriptedEngine):
        async def release(self, pin_key: str, tokens: Sequence[int] | None = None) -> None:
            raise EngineUnavailable("gone")

    outcome = await run_job(spec("beam"), Deaf(), MemoryJournal())
    assert outcome.status == "completed"


async def test_an_engine_that_hangs_on_a_release_does_not_block_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ScriptedEngine):
        async def release(self, pin_key: str, tokens: Sequence[int] | None = None) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("reasoner.search.prefix_pin.RELEASE_TIMEOUT_SECONDS", 0.0)
    outcome = await run_job(spec("beam"), Silent(), MemoryJournal())
    assert outcome.status == "completed"
