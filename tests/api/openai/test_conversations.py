"""A conversation is answered by whole texts: no answer is asked for or extracted unless something compares answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from api.openai.chat.body import ChatBody
from api.openai.responses.body import ResponseBody
from reasoner.admission.sources import Submission, merge_sources
from reasoner.jobs.messages import Message
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from workers.config.settings import Settings

GREETING = "Hi! My name is Ada"
SERVICE = Settings.model_validate({"models": {"mine": {}, "judged": {"verifier": {"kind": "judge"}}}})
WHOLE: dict[str, Any] = {"compare": "text", "extract": "all"}


def resolve(request: JobRequest) -> JobSpec:
    return merge_sources(Submission.to_service(request, SERVICE)).spec


def ask(model: str, **fields: Any) -> JobSpec:
    body = {"model": model, "messages": [{"role": "user", "content": GREETING}]} | fields
    parsed = TypeAdapter(ChatBody).validate_python(body)
    return resolve(parsed.to_job([message.to_message() for message in parsed.messages], SERVICE, ()))


def test_with_a_verifier_the_best_whole_text_is_chosen() -> None:
    spec = ask("judged")
    assert (spec.strategy.name, spec.answer.model_dump(include={"compare", "extract"})) == ("best_of_n", WHOLE)


def test_without_a_verifier_one_text_is_sampled_and_choices_are_texts() -> None:
    spec = ask("mine", temperature=0.7)
    assert spec.strategy.model_dump() == {"name": "self_consistency", "n": 1}
    assert (spec.answer.extract, spec.sampling.temperature) == ("all", 0.7)
    assert ask("mine", n=3).strategy.model_dump() == {"name": "self_consistency", "n": 3}


def test_the_route_of_responses_has_the_same_default() -> None:
    body = ResponseBody.model_validate({"model": "mine", "input": GREETING})
    spec = resolve(body.to_job([Message(role="user", content=GREETING)], SERVICE, ()))
    assert (spec.strategy.model_dump(), spec.answer.extract) == ({"name": "self_consistency", "n": 1}, "all")


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"strategy": {"name": "self_consistency", "n": 4}}, "self_consistency"),
        ({"answer": "math"}, "self_consistency"),
        ({"confidence": 0.9, "strategy": {"name": "auto"}}, "auto"),
        ({"reasoning_effort": "medium"}, "self_consistency"),
        ({"verifier": {"kind": "numeric", "expected": 4}}, "best_of_n"),
    ],
)
def test_a_request_that_compares_answers_extracts_them(fields: dict[str, Any], strategy: str) -> None:
    body = {"model": "mine", "messages": [{"role": "user", "content": GREETING}]} | fields
    parsed = TypeAdapter(ChatBody).validate_python(body)
    spec = resolve(parsed.to_job([message.to_message() for message in parsed.messages], SERVICE, ()))
    assert spec.answer.extract == "auto"
    if "reasoning_effort" not in fields:  # which is applied when the job is resolved
        assert spec.strategy.name == strategy


def test_a_constraint_compares_as_it_does_in_a_job_and_takes_one_sample() -> None:
    spec = ask("mine", response_format={"type": "json_object"})
    assert (spec.answer.compare, spec.answer.extract) == ("json", "all")
    assert spec.strategy.model_dump() == {"name": "self_consistency", "n": 1}
