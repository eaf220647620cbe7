"""Effort names stand for limits and a strategy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.protocol.types import InvalidRequest
from reasoner.admission.effort import DEFAULT_EFFORTS, Effort, apply_effort
from reasoner.jobs.spec import JobSpec

EFFORTS = DEFAULT_EFFORTS | {
    "thrifty": Effort.model_validate({"tokens": 500, "cost": 0.5, "strategy": {"name": "beam", "n": 4}}),
    "quick": Effort(seconds=2.5),
}


def spec(effort: str, **more: Any) -> JobSpec:
    budget = {"effort": effort} | more.pop("budget", {})
    return JobSpec.model_validate({"problem": "?", "budget": budget} | more)


def test_an_effort_sets_limits_and_a_strategy_for_jobs_without_one() -> None:
    job = apply_effort(spec("thrifty"), EFFORTS)
    assert job.budget.model_dump(exclude_none=True) == {"tokens": 500, "cost": 0.5, "effort": "thrifty"}
    assert (job.strategy.name, job.strategy.params["n"]) == ("beam", 4)
    chosen = apply_effort(spec("thrifty", strategy={"name": "greedy"}), EFFORTS)
    assert chosen.strategy.name == "greedy"
    assert apply_effort(spec("quick"), EFFORTS).strategy == spec("quick").strategy


def test_of_the_limits_of_an_effort_and_of_a_job_for_thoughts_the_lower_one_holds() -> None:
    efforts = {"brief": Effort(tokens=900, thinking_tokens=64), "plain": Effort(tokens=900)}
    for name, own, expected in (("brief", None, 64), ("brief", 32, 32), ("brief", 99, 64), ("plain", 99, 99)):
        job = apply_effort(spec(name, budget={"thinking_tokens": own}), efforts)
        assert (job.thinking_tokens, job.budget.tokens) == (expected, 900)


def test_a_resolved_job_can_be_submitted_again() -> None:
    job = apply_effort(spec("thrifty"), EFFORTS)
    assert apply_effort(JobSpec.model_validate(job.model_dump()), EFFORTS) == JobSpec.model_validate(job.model_dump())


def test_a_higher_effort_has_a_larger_token_budget() -> None:
    tokens = [DEFAULT_EFFORTS[name].tokens or 0 for name in ("minimal", "low", "medium", "high")]
    assert tokens == sorted(set(tokens))


def test_an_unknown_effort_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidRequest, match="max, none, thrifty, quick"):
        apply_effort(spec("epic"), EFFORTS)


@pytest.mark.parametrize(("limit", "value"), [("tokens", 501), ("seconds", 9.0), ("flops", 1e12), ("cost", 0.6)])
def test_limits_that_contradict_the_effort_are_named_with_its_values(limit: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        apply_effort(spec("thrifty", budget={limit: value}), EFFORTS)
    assert refused.value.field == f"budget.{limit}"
    assert "tokens 500, cost 0.5" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({}, "at least one of tokens, seconds, flops, cost"),
        ({"strategy": "greedy"}, "at least one of"),
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"tokens": 5, "strategy": "oracle"}, "unknown strategy 'oracle'"),
        ({"tokens": 5, "strategy": {"name": "greedy", "n": 3}}, "its parameters: none"),
        ({"tokens": 5, "tempo": 3}, "Extra inputs"),
    ],
)
def test_an_invalid_effort_is_refused(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        Effort.model_validate(values)
