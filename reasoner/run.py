"""Runs one job from its specification to its result, on whatever engine and journal it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from engine.types import EngineClient
from reasoner.equivalence import Equivalence
from reasoner.jobs import JobResult, JobSpec, Usage
from reasoner.journal import Journal
from reasoner.lease import CacheLease
from reasoner.prices import Prices
from reasoner.search import Models, Search
from reasoner.served import wanted_policy
from reasoner.strategies import STRATEGIES, Choice, resolve


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended. ``completed`` has an answer, ``incomplete`` has none."""

    status: Literal["completed", "incomplete"]
    result: JobResult
    usage: Usage


async def run_job(
    spec: JobSpec,
    engine: EngineClient,
    journal: Journal,
    *,
    cancelled: asyncio.Event | None = None,
    prices: Mapping[str, Prices] | None = None,
) -> JobOutcome:
    """Searches for an answer; ``spec.seed`` must be set, and models where several are served. ``prices`` are by model.

    Raises ``JobCancelled`` soon after ``cancelled`` is set, ``LeaseLost`` when the journal has another owner,
    ``EngineUnavailable`` when the engine is away (run it again later: the journal holds what is done), and
    ``InvalidRequest`` for what can never work.
    """
    strategy = STRATEGIES[spec.strategy.name]
    params = resolve(spec.strategy.name, spec.strategy.params)
    async with open_search(spec, engine, journal, cancelled=cancelled, prices=prices) as (search, equivalence):
        choice = await strategy.run(search, params, equivalence.settled_by(search.settle))
        await search.select(choice.node)
    return _outcome(search, choice)


@asynccontextmanager
async def open_search(
    spec: JobSpec,
    engine: EngineClient,
    journal: Journal,
    *,
    cancelled: asyncio.Event | None = None,
    prices: Mapping[str, Prices] | None = None,
) -> AsyncIterator[tuple[Search, Equivalence]]:
    """What ``run_job`` hands to the strategy: with a verifier if the strategy needs one. Raises as ``run_job``."""
    needs_verifier = STRATEGIES[spec.strategy.name].needs_verifier
    async with CacheLease(engine, journal.job_id) as lease, Equivalence() as equivalence:
        served = {info.id: info for info in await engine.models()}
        policy = wanted_policy(spec).find(served.values())
        models = Models(engine, served, policy, lease, needs_verifier, equivalence, prices or {})
        search = await Search.begin(spec, models, journal, cancelled or asyncio.Event())
        try:
            yield search, equivalence
        finally:
            await search.close()


def _outcome(search: Search, choice: Choice) -> JobOutcome:
    node = choice.node
    finished: Literal["answer", "no_answer"] = "no_answer" if node is None else "answer"
    result = JobResult(
        answer=None if node is None else node.answer,
        text=None if node is None else node.solution,
        confidence=choice.confidence,
        votes=choice.votes,
        finish_reason="budget" if search.cut_short else finished,
        node=None if node is None else node.id,
    )
    return JobOutcome("completed" if node is not None else "incomplete", result, search.ledger.usage)
