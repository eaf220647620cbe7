"""A check that holds for every job: its budget is kept, and what it paid for is replayed after a crash."""

from __future__ import annotations

import contextlib
from typing import Protocol

from engine.protocol.types import EngineUnavailable
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.scripted import ScriptedEngine


class CreateEngine(Protocol):
    def __call__(self, *, order: int = 0, die_after: int | None = None) -> ScriptedEngine: ...


async def check_budget_and_replay(spec: JobSpec, create_engine: CreateEngine, order: int, die_after: int) -> None:
    """Check a job with a budget of tokens: undisturbed, resumed after its engine died, and replayed from its journal.

    ``order`` seeds the order in which branches end; the engine dies after ``die_after`` answers.
    """
    tokens = spec.budget.tokens
    assert tokens is not None
    engine = create_engine(order=order)
    usage = (await run_job(spec, engine, MemoryJournal())).usage
    assert engine.most <= tokens
    assert usage.total == engine.total
    assert engine.outstanding == 0
    journal = MemoryJournal()
    with contextlib.suppress(EngineUnavailable):
        await run_job(spec, create_engine(order=order, die_after=die_after), journal)
    outcome = await run_job(spec, create_engine(order=order + 1), journal)
    assert outcome.usage.total <= tokens
    idle = create_engine()
    again = await run_job(spec, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage, idle.total) == (outcome.result, outcome.usage, 0)
