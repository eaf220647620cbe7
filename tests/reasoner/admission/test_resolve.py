"""A job is resolved once: unset fields are filled in, and resolving the result again changes nothing."""

from __future__ import annotations

import pytest

from engine.protocol.types import EngineUnavailable, ModelInfo
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from workers.config.settings import Settings


class NoEngine:
    async def models(self) -> list[ModelInfo]:
        raise EngineUnavailable("no engine answers")


class Serving:
    """Engine with the bundled models, whose policy recommends sampling parameters."""

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo("policy", "generate", 256, 100, 1000, sampling={"temperature": 0.6, "top_k": 20})]


async def test_the_resolved_parameters_are_echoed() -> None:
    job = JobRequest.model_validate({"problem": "2 + 2?", "strategy": {"name": "beam", "n": 8}})
    resolved = await resolve_job(job, Settings(), NoEngine())
    assert resolved.model_dump()["strategy"] == {
        "name": "beam",
        "n": 8,
        "expansions": 4,
        "max_steps": 40,
        "adaptive": True,
    }
    assert JobSpec.model_validate(resolved.model_dump()) == resolved


async def test_every_unset_field_is_filled_in() -> None:
    service = Settings()
    resolved = await resolve_job(JobRequest(problem="2 + 2?"), service, NoEngine())
    assert (resolved.model, resolved.budget.tokens) == (service.model_name, service.budget_tokens)
    assert resolved.seed is not None


async def test_a_job_of_a_batch_has_no_budget_of_its_own_by_default() -> None:
    resolved = await resolve_job(JobRequest(problem="2 + 2?"), Settings(), NoEngine(), in_batch=True)
    assert (resolved.priority, resolved.budget.model_dump(exclude_none=True)) == ("batch", {})


async def test_sampling_that_is_left_open_is_the_models_own_and_else_neutral() -> None:
    job = JobRequest.model_validate({"problem": "2 + 2?", "sampling": {"temperature": 1}})
    resolved = await resolve_job(job, Settings(), Serving())
    echoed = {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "max_tokens": None}
    echoed |= {"thinking_tokens": None, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert resolved.sampling.model_dump() == echoed


async def test_sampling_stays_open_until_an_engine_answers() -> None:
    resolved = await resolve_job(JobRequest(problem="2 + 2?"), Settings(), NoEngine())
    assert set(resolved.sampling.model_dump().values()) == {None}


class Calling:
    """Engine with a model whose chat template shows a format of calls."""

    async def models(self) -> list[ModelInfo]:
        template = "{{ tools }}<tool_call>{{ call.arguments }}</tool_call>"
        return [ModelInfo("policy", "generate", 256, 100, 1000, chat_template=template)]


async def test_the_format_of_python_is_filled_in() -> None:
    job = JobRequest.model_validate({"problem": "2 + 2?", "tools": [{"type": "python"}]})
    for engine, chosen in ((Calling(), "hermes"), (Serving(), "blocks"), (NoEngine(), None)):
        resolved = await resolve_job(job, Settings(), engine)
        assert resolved.python is not None
        assert resolved.python.call_format == chosen
        assert [message["role"] for message in resolved.to_messages()] == ["system"] * (chosen != "hermes") + ["user"]


async def test_a_schema_to_which_a_demanded_call_cannot_be_held_is_refused_with_its_path() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "name": "clock"}, {"type": "function", "name": "f", "parameters": schema}]
    fields = {"problem": "2 + 2?", "tools": tools, "strategy": {"name": "self_consistency"}, "verifier": None}
    for choice in ("required", {"name": "f"}):
        with pytest.raises(JobRefused, match="uniqueItems") as caught:
            await resolve_job(JobRequest.model_validate(fields | {"tool_choice": choice}), Settings(), Calling())
        assert caught.value.field == "tools.1.parameters.properties.a"
    for choice in ("auto", {"name": "clock"}):
        await resolve_job(JobRequest.model_validate(fields | {"tool_choice": choice}), Settings(), Calling())
