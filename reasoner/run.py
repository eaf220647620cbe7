"""Runs one job from its specification to its result, on whatever engine and journal it is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from engine.types import EngineClient, InvalidRequest, ModelInfo
from prm.scorer import StepScorer
from reasoner.equivalence import Equivalence
from reasoner.jobs import JobResult, JobSpec, Usage
from reasoner.journal import Journal
from reasoner.lease import CacheLease
from reasoner.search import Models, Search
from reasoner.strategies import STRATEGIES, Choice, resolve


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended. ``completed`` has an answer, ``incomplete`` has none."""

    status: Literal["completed", "incomplete"]
    result: JobResult
    usage: Usage


async def run_job(
    spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event | None = None
) -> JobOutcome:
    """Searches for an answer; ``spec.model``, ``spec.verifier.model`` and ``spec.seed`` must be set.

    Raises ``JobCancelled`` soon after ``cancelled`` is set, ``LeaseLost`` when the journal has another owner,
    ``EngineUnavailable`` when the engine is away (run it again later: the journal holds what is done), and
    ``InvalidRequest`` for what can never work.
    """
    strategy = STRATEGIES[spec.strategy.name]
    params = resolve(spec.strategy.name, spec.strategy.params)
    async with CacheLease(engine, journal.job_id) as lease:
        models = await _models(spec, engine, lease, strategy.needs_verifier)
        search = await Search.begin(spec, models, journal, cancelled or asyncio.Event())
        try:
            async with Equivalence() as equivalence:
                choice = await strategy.run(search, params, equivalence)
            await search.select(choice.node)
        finally:
            await search.close()
    return _outcome(search, choice)


async def _models(spec: JobSpec, engine: EngineClient, lease: CacheLease, needs_verifier: bool) -> Models:
    served = {info.id: info for info in await engine.models()}
    policy = _served(served, spec.model, "model", "generate")
    if not needs_verifier:
        return Models(engine, policy, None, lease)
    verifier = _served(served, spec.verifier.model, "verifier.model", "classify")
    return Models(engine, policy, StepScorer(engine, verifier, lease.name), lease)


def _served(served: dict[str, ModelInfo], name: str | None, field: str, kind: str) -> ModelInfo:
    fitting = sorted(info.id for info in served.values() if info.kind == kind)
    if name is None and len(fitting) == 1:
        name = fitting[0]
    if name not in fitting:
        raise InvalidRequest(f"{field} {name!r} is not served; served are {', '.join(fitting) or 'none'}", field)
    return served[name]


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
