"""A model is asked for its answer, unless the job or the model has a prompt; evaluations ask as a service does."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol.types import EngineUnavailable, ModelInfo
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.resolve import resolve_job, resolve_program_job
from reasoner.answers.instruction import find_instruction
from reasoner.answers.spec import AnswerSpec
from reasoner.budget.spec import Budget
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import DEFAULT_STRATEGY, JobSpec
from workers.config.settings import Settings, load_settings

BOXED = "Reason step by step, and put the final answer in \\boxed{}."
VOTE = {"name": "self_consistency"}
QUESTION = {"role": "user", "content": "2 + 2?"}


class NoEngine:
    async def models(self) -> list[ModelInfo]:
        raise EngineUnavailable("no engine answers")


async def resolve(service: Settings | None = None, **fields: Any) -> JobSpec:
    body: dict[str, Any] = {"strategy": VOTE} | ({"problem": "2 + 2?"} if "messages" not in fields else {})
    return await resolve_job(JobRequest.model_validate(body | fields), service or Settings(), NoEngine())


async def test_the_instruction_is_in_the_stored_prompt_and_in_the_last_message() -> None:
    job = await resolve()
    assert job.prompt == "{problem}\n\n" + BOXED
    assert job.to_messages() == [{"role": "user", "content": "2 + 2?\n\n" + BOXED}]
    assert job.conversation == [QUESTION]
    turns = [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]
    asked = (await resolve(messages=turns)).to_messages()
    assert asked == [*turns[:2], {"role": "user", "content": "And 3 + 3?\n\n" + BOXED}]


@pytest.mark.parametrize("strategy", ["best_of_n", "greedy", "beam", "mcts", "ab_mcts"])
async def test_a_strategy_that_compares_no_answers_asks_the_bare_question(strategy: str) -> None:
    fields: dict[str, Any] = {"strategy": {"name": strategy}, "messages": [QUESTION]}
    assert (await resolve(**fields)).to_messages() == [QUESTION]
    assert (await resolve(**fields, answer="choice")).prompt is not None  # the client says what an answer is
    if strategy not in ("greedy", "beam"):
        assert BOXED in str((await resolve(**fields, verifier={"kind": "numeric", "expected": 4})).prompt)


@pytest.mark.parametrize("strategy", ["self_consistency", "weighted_vote", "auto", "first_finished", "rebase"])
async def test_a_strategy_that_votes_asks_for_the_answer(strategy: str) -> None:
    assert BOXED in str((await resolve(strategy={"name": strategy})).prompt)


async def test_the_instruction_follows_the_strategy_of_an_effort() -> None:
    for effort, asks in (("minimal", False), ("medium", True)):
        spec = JobRequest.model_validate({"problem": "2 + 2?", "budget": {"effort": effort}})
        assert ((await resolve_job(spec, Settings(), NoEngine())).prompt is not None) == asks


async def test_a_job_of_a_batch_is_asked_alike() -> None:
    spec = JobRequest.model_validate({"problem": "2 + 2?", "strategy": VOTE})
    assert (await resolve_job(spec, Settings(), NoEngine(), in_batch=True)).prompt == (await resolve()).prompt


async def test_the_instruction_fits_the_answer() -> None:
    job = await resolve(answer="choice")
    assert job.prompt == "{problem}\n\n" + str(find_instruction(AnswerSpec(compare="choice")))
    schema = {"kind": "json_schema", "json_schema": {"type": "object"}}
    assert "```json" in str((await resolve(verifier=schema)).prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"answer": {"instruct": False}},
        {"answer": {"extract": {"regex": "(a)"}}},
        {"system": "Be short."},
        {"messages": [{"role": "system", "content": "Be short."}, QUESTION]},
    ],
)
async def test_a_job_with_a_prompt_of_its_own_or_without_an_instruction_is_asked_as_it_is(fields: Any) -> None:
    assert (await resolve(**fields)).prompt is None
    assert (await resolve(prompt="Q: {problem}", **fields)).prompt == "Q: {problem}"


async def test_a_models_prompt_takes_the_place_of_the_instruction() -> None:
    service = Settings.model_validate({"models": {"policy": {"prompt": "{problem} Answer:"}}})
    assert (await resolve(service)).prompt == "{problem} Answer:"
    assert (await resolve(service, prompt=None)).prompt == "{problem}\n\n" + BOXED
    service = Settings.model_validate({"models": {"policy": {"system": "Put it in a box."}}})
    asked = await resolve(service)
    assert (asked.system, asked.prompt) == ("Put it in a box.", None)


async def test_a_model_switches_the_instruction_off_also_for_jobs_that_compare_otherwise() -> None:
    service = Settings.model_validate({"models": {"policy": {"answer": {"instruct": False}}}})
    assert (await resolve(service)).prompt is None
    assert (await resolve(service, answer="text")).prompt is None
    assert (await resolve(service, answer={"instruct": True})).prompt is not None


async def test_an_evaluations_job_is_asked_as_a_services_job() -> None:
    for defaults in ({}, {"prompt": "{problem} Answer:"}, {"system": "Be short."}):
        models = {"policy": ModelDefaults.model_validate(defaults)}
        served = await resolve(Settings.model_validate({"models": {"policy": defaults}}))
        question = JobRequest.model_validate({"problem": "2 + 2?", "model": "policy", "strategy": VOTE})
        measured = resolve_program_job(question, models)
        assert measured.to_messages() == served.to_messages()


def test_an_evaluations_job_has_neither_the_budget_nor_the_strategy_of_its_model() -> None:
    models = {"policy": ModelDefaults.model_validate({"budget": {"tokens": 5}, "strategy": "greedy", "stop": ["Q:"]})}
    asked = resolve_program_job(JobRequest(problem="2 + 2?", model="policy"), models)
    assert (asked.budget, asked.strategy.name, asked.stop) == (Budget(), DEFAULT_STRATEGY, ["Q:"])


@pytest.mark.parametrize("model", ["policy", "policy-large"])
async def test_the_bundled_policies_are_asked_the_bare_question(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONER_MODEL", model)
    assert (await resolve(load_settings())).to_messages() == [QUESTION]
    assert (await resolve(load_settings(), answer="text")).to_messages() == [QUESTION]
