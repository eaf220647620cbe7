"""A job's schema: refused fields, with messages that name the valid values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from reasoner.budget.usage import Usage
from reasoner.jobs.messages import MAX_PROBLEM_CHARS
from tests.specs import build_spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": ""}, "at least 1 character"),
        ({"problem": " \n"}, "the problem is empty"),
        ({"problem": "x" * (MAX_PROBLEM_CHARS + 1)}, f"at most {MAX_PROBLEM_CHARS} characters"),
        ({"problem": None}, "give 'problem', a text, or 'messages'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "either 'problem' or 'messages'"),
        ({"budjet": {"tokens": 3}}, "Extra inputs are not permitted"),
        ({"budget": {"tokens": 0}}, "greater than or equal to 1"),
        ({"budget": {"seconds": 0}}, "greater than 0"),
        ({"budget": {"seconds": float("nan")}}, "finite number"),
        ({"budget": {"token": 5}}, "Extra inputs are not permitted"),
        ({"strategy": {}}, "Field required"),
        ({"sampling": {"temperature": -1}}, "greater than or equal to 0"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": 2**63}, "less than"),
        ({"verifier": {"aggregation": "median"}}, "'last', 'min', 'prod', 'mean' or 'max'"),
        ({"metadata": {"k": "v" * 600}}, "at most 512 characters"),
        ({"prompt": "Answer this."}, "write {problem} where the question belongs"),
        ({"stop": [""]}, "at least 1 character"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is set by the engine"),
        ({"problem": None, "messages": [{"role": "system", "content": "x"}], "system": "y"}, "either 'system' or"),
    ],
)
def test_an_invalid_job_is_refused_with_the_valid_values(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_spec({"problem": "2 + 2?"} | change)


def test_usage_is_summed_by_field_and_its_total_is_what_a_budget_counts() -> None:
    total = Usage(prompt=5, generated=3, verifier_computed=2, pruned=1) + Usage(generated=4, seconds=0.5)
    assert total == Usage(prompt=5, generated=7, verifier_computed=2, pruned=1, seconds=0.5)
    assert total.total == 9


def test_the_model_gets_the_question_within_the_prompt_after_the_system_message() -> None:
    job = build_spec(problem="{x} + 2?", system="Be brief.", prompt="Solve {problem}\nEnd with \\boxed{}.")
    assert job.to_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Solve {x} + 2?\nEnd with \\boxed{}."},
    ]
    assert job.conversation == [{"role": "user", "content": "{x} + 2?"}]


def test_a_prompt_holds_the_last_message_of_a_conversation_if_it_is_the_users() -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    job = build_spec({"messages": turns, "prompt": "<{problem}>"})
    assert [turn["content"] for turn in job.to_messages()] == ["a", "b", "<c>"]
    begun = job.model_copy(update={"messages": (job.messages or [])[:2]})
    assert begun.to_messages() == turns[:2]
