"""A search with several models goes on without one whose server is away, says so, and does the same in a replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import (
    Completion,
    Delta,
    EngineBusy,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    SomeModelsAway,
    TokenizeRequest,
)
from engine.remote.router import RoutedEngine
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.journal import JobCancelled, MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.search.policies import availability
from reasoner.search.policies.availability import Availability
from reasoner.search.policies.policy import Policy
from tests.reasoner.search.test_policies import TEMPLATES, VARIANTS, Two, name_fields
from tests.specs import build_spec
from workers.config.settings import Settings

PANEL: dict[str, Any] = {"name": "synthesize", "n": 4, "judge": "report", "judged_by": "other", "written_by": "other"}


class Partly(Two):
    """Serves ``other`` as long as it is not ``away``, and then answers as the router of several servers does.

    ``answers``: the number of its requests that are answered before it goes away.
    """

    def __init__(self, *, away: bool = False, answers: int = 1000, error: EngineUnavailable | None = None) -> None:
        super().__init__(1)
        self.is_away = away
        self._num_left = answers
        self._absence = error or EngineUnavailable("http://b could not be reached")

    async def models(self) -> list[ModelInfo]:
        models = await super().models()
        if self.is_away:
            raise SomeModelsAway(str(self._absence), [info for info in models if info.id != "other"])
        return models

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        if request.model == "other":
            if self._num_left == 0:
                raise self._absence
            self._num_left -= 1
        async for event in super().generate(request, stream=stream):
            yield event


def job(strategy: dict[str, Any] = PANEL, wait: float = 0.0, **more: Any) -> JobSpec:
    models = [{"model": "policy", "wait_seconds": wait}, {"model": "other", "wait_seconds": wait}]
    return build_spec(name_fields(strategy, models=models, **more))


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "RETRY_SECONDS", 0.0)


def note_of(outcome: JobOutcome) -> str:
    return outcome.result.note or ""


@pytest.mark.parametrize("strategy", VARIANTS, ids=lambda strategy: "-".join(map(str, strategy.values())))
@pytest.mark.parametrize("answers", [None, 0])
async def test_a_search_goes_on_without_a_model_that_is_away_and_names_it(
    strategy: dict[str, Any], answers: int | None
) -> None:
    """At its start, or later. A replay in which the model is back decides the same."""
    engine = Partly(away=True) if answers is None else Partly(answers=answers)
    journal = MemoryJournal()
    outcome = await run_job(job(strategy), engine, journal)
    assert outcome.status == "completed"
    assert "went on without model 'other': " in note_of(outcome)
    assert engine.outstanding == 0
    before = len(journal.entries)
    again = await run_job(job(strategy), Partly(), journal)
    assert len(journal.entries) == before
    assert replace(again, usage=outcome.usage) == outcome


@pytest.mark.parametrize("error", [EngineUnavailable("it is down"), EngineBusy("429: too many requests", 1.0)])
async def test_the_result_says_why_a_model_was_given_up(error: EngineUnavailable) -> None:
    outcome = await run_job(job(), Partly(answers=0, error=error), MemoryJournal())
    assert note_of(outcome) == f"went on without model 'other': {error}"
    away = await run_job(job(), Partly(away=True), MemoryJournal())
    assert note_of(away) == "went on without model 'other': its server did not answer at the start"


async def test_the_next_model_judges_and_writes_where_the_named_one_is_away() -> None:
    engine = Partly(answers=1)  # its samples, but neither the report nor the last solution
    outcome = await run_job(job(), engine, MemoryJournal())
    assert [request.model for request in engine.requests][-2:] == ["policy", "policy"]
    assert outcome.status == "completed"
    assert outcome.result.usage_by_model["other"].generated > 0
    assert outcome.result.usage_by_model["policy"].generated > 0


async def test_a_model_that_is_back_within_its_time_takes_part() -> None:
    class Flaky(Partly):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            if request.model == "other" and self.failures:
                self.failures -= 1
                raise EngineUnavailable("restarting")
            async for event in super().generate(request, stream=stream):
                yield event

        failures = 3

    outcome = await run_job(job(wait=60.0), Flaky(), MemoryJournal())
    calm = await run_job(job(wait=60.0), Partly(), MemoryJournal())
    assert outcome.result == calm.result
    assert note_of(outcome) == ""


class Limited(Partly):
    """Refuses ``other`` for a moment, and wants to be asked again a little later. Counts what it refuses."""

    def __init__(self, *, wants: float, until: float) -> None:
        super().__init__()
        self.num_refused = 0
        self.has_refused = asyncio.Event()
        self._wants = wants
        self._until = asyncio.get_running_loop().time() + until

    def refuse(self, model: str) -> None:
        if model == "other" and asyncio.get_running_loop().time() < self._until:
            self.num_refused += 1
            self.has_refused.set()
            raise EngineBusy("429: too many requests", self._wants)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        self.refuse(request.model)
        async for event in super().generate(request, stream=stream):
            yield event


async def test_a_server_that_wants_time_is_asked_again_after_it() -> None:
    engine = Limited(wants=0.3, until=0.2)
    outcome = await run_job(job({"name": "self_consistency", "n": 2}, wait=60.0), engine, MemoryJournal())
    assert engine.num_refused == 1
    assert note_of(outcome) == ""


async def test_a_server_that_wants_more_time_than_its_model_has_is_given_up_after_that() -> None:
    engine = Limited(wants=3600.0, until=3600.0)
    outcome = await run_job(job({"name": "self_consistency", "n": 2}, wait=0.2), engine, MemoryJournal())
    assert engine.num_refused in (2, 3)  # a timer may end a nanosecond early
    assert "went on without model 'other'" in note_of(outcome)


async def test_a_job_that_is_cancelled_does_not_wait_for_a_server_that_wants_time() -> None:
    engine, cancelled = Limited(wants=3600.0, until=3600.0), asyncio.Event()
    running = asyncio.create_task(run_job(job(wait=3600.0), engine, MemoryJournal(), cancelled=cancelled))
    await engine.has_refused.wait()
    cancelled.set()
    async with asyncio.timeout(5):
        with pytest.raises(JobCancelled):
            await running


async def test_the_job_waits_where_no_model_answers_or_the_only_one_is_away() -> None:
    class Down(Two):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            raise EngineUnavailable("down")
            yield

    with pytest.raises(EngineUnavailable, match="down"):
        await run_job(job(), Down(1), MemoryJournal())
    single = build_spec({"problem": "how?", "model": "other", "strategy": {"name": "greedy"}})
    with pytest.raises(SomeModelsAway):
        await run_job(single, Partly(away=True), MemoryJournal())
    healthy = build_spec({"problem": "how?", "model": "policy", "strategy": {"name": "greedy"}, "answer": "text"})
    assert (await run_job(healthy, Partly(away=True), MemoryJournal())).status == "completed"


async def test_a_search_that_began_with_a_model_waits_for_it_when_it_resumes() -> None:
    journal = MemoryJournal()
    await run_job(job(), Partly(), journal)
    journal.entries = journal.entries[:4]
    with pytest.raises(SomeModelsAway):
        await run_job(job(), Partly(away=True), journal)


@pytest.mark.parametrize("kept", [4, 9])
async def test_a_search_that_resumes_goes_on_without_a_model_that_was_seen_before(kept: int) -> None:
    """It keeps what the model wrote, gives it its time, and decides in a replay as it did."""

    class Remembered(Partly):
        async def models(self) -> list[ModelInfo]:
            try:
                return await super().models()
            except SomeModelsAway as error:
                last = [info for info in await Two(1).models() if info.id == "other"]
                raise SomeModelsAway(str(error), error.known, last) from None

    journal = MemoryJournal()
    await run_job(job(), Partly(), journal)
    journal.entries = journal.entries[:kept]
    outcome = await run_job(job(), Remembered(away=True, answers=0), journal)
    assert outcome.status == "completed"
    assert note_of(outcome) == "went on without model 'other': http://b could not be reached"
    before = len(journal.entries)
    again = await run_job(job(), Partly(), journal)
    assert len(journal.entries) == before
    assert replace(again, usage=outcome.usage) == outcome


async def test_a_branch_that_loses_its_server_in_the_middle_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of an undisturbed run, none is generated twice, and a replay decides the same."""
    monkeypatch.setattr("reasoner.search.generation.SEGMENT_TOKENS", 8)

    class Hiccup(Partly):
        failures = 2

        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            has_begun = any(branch.generated for branch in request.branches)
            if request.model == "other" and has_begun and self.failures:
                self.failures -= 1
                raise EngineUnavailable("restarting")
            async for event in super().generate(request, stream=stream):
                yield event

    engine, journal = Hiccup(), MemoryJournal()
    strategy = {"name": "self_consistency", "n": 6}
    outcome = await run_job(job(strategy, wait=60.0), engine, journal)
    calm = await run_job(job(strategy, wait=60.0), Partly(), MemoryJournal())
    assert engine.failures == 0
    assert outcome.result == calm.result
    assert outcome.usage.generated == calm.usage.generated
    assert len(set(engine.generated)) == len(engine.generated)
    again = await run_job(job(strategy, wait=60.0), Partly(), journal)
    assert again.result == outcome.result


async def test_a_writer_whose_server_does_not_even_tokenize_is_replaced() -> None:
    class Dead(Partly):
        dies = True

        async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
            if self.dies and request.model == "other" and self._num_left == 0:
                raise EngineUnavailable("http://b could not be reached")
            return await super().tokenize(request)

    journal = MemoryJournal()
    outcome = await run_job(job(), Dead(answers=1), journal)
    assert note_of(outcome) == "went on without model 'other': http://b could not be reached"
    again = await run_job(job(), Partly(), journal)
    assert (again.result, note_of(again)) == (outcome.result, note_of(outcome))


async def test_a_job_waits_for_a_member_that_is_its_verifier() -> None:
    judge = {"verifier": {"kind": "judge", "model": "other"}, "strategy": {"name": "best_of_n", "n": 4}}
    with pytest.raises(SomeModelsAway):
        await run_job(
            build_spec(name_fields(judge["strategy"], verifier=judge["verifier"])), Partly(away=True), MemoryJournal()
        )


async def test_a_wait_for_a_member_ends_with_the_jobs_time_and_when_it_is_cancelled() -> None:
    outcome = await run_job(job(wait=3600.0, budget={"seconds": 0.2}), Partly(answers=0), MemoryJournal())
    assert "went on without model 'other'" in note_of(outcome)
    cancelled = asyncio.Event()
    cancelled.set()
    with pytest.raises(JobCancelled):
        await run_job(job(wait=3600.0), Partly(away=True), MemoryJournal(), cancelled=cancelled)


def test_a_policy_is_asked_again_until_its_time_is_over() -> None:
    now = [0.0]
    info = ModelInfo("a", "generate", 256, 100, 1000)
    sampling = build_spec({"problem": "?"}).sampling
    policies = [Policy(info, sampling, wait_seconds=10.0), Policy(info, sampling, wait_seconds=10.0)]
    state = Availability(policies, lambda: now[0])
    assert state.record_failure(1) is True
    now[0] = 9.9
    assert state.record_failure(1) is True
    now[0] = 10.0
    assert state.record_failure(1) is False
    assert state.record_failure(0) is True  # its own time has just begun
    now[0] = 20.0
    assert state.record_failure(0) is None
    state.record_answer(1)
    assert state.record_failure(0) is False
    assert Availability([Policy(info, sampling)], lambda: now[0]).record_failure(0) is None


async def test_the_router_lists_the_models_of_servers_that_answer() -> None:
    class Away(Two):
        async def models(self) -> list[ModelInfo]:
            raise EngineUnavailable("http://b is down")

    with pytest.raises(SomeModelsAway, match="http://b is down") as caught:
        await RoutedEngine(Two(1), {"far": Away(1)}).models()
    assert [info.id for info in caught.value.known] == ["policy", "other", "prm"]
    with pytest.raises(EngineUnavailable, match="is down") as all_away:
        await RoutedEngine(Away(1), {"far": Away(1)}).models()
    assert not isinstance(all_away.value, SomeModelsAway)


async def test_a_judge_or_writer_that_is_none_of_the_jobs_models_is_refused() -> None:
    request = JobRequest.model_validate(name_fields(PANEL | {"written_by": "gpt"}) | {"budget": {"tokens": 500}})
    with pytest.raises(JobRefused, match="'gpt' is none of the job's models: name one of policy, other") as caught:
        await resolve_job(request, Settings(), Two(1))
    assert caught.value.field == "strategy.written_by"
    no_report = {"name": "synthesize", "judge": "report", "template": TEMPLATES["select"]}
    with pytest.raises(JobRefused, match=r"it must use \{\{ report \}\}"):
        await resolve_job(JobRequest.model_validate(name_fields(no_report)), Settings(), Two(1))
