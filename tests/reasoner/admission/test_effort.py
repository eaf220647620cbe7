"""Effort names stand for limits and a strategy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from reasoner.admission.effort import DEFAULT_EFFORTS, Effort, find_contradiction
from reasoner.budget.spec import Budget

EFFORTS = DEFAULT_EFFORTS | {
    "thrifty": Effort.model_validate({"tokens": 500, "cost": 0.5, "strategy": {"name": "beam", "n": 4}}),
    "quick": Effort(seconds=2.5),
}


def test_a_higher_effort_has_a_larger_token_budget() -> None:
    tokens = [DEFAULT_EFFORTS[name].tokens or 0 for name in ("minimal", "low", "medium", "high")]
    assert tokens == sorted(set(tokens))


def test_an_unknown_effort_is_refused_with_the_known_names() -> None:
    fault = find_contradiction(Budget(effort="epic"), EFFORTS)
    assert fault is not None
    assert "max, none, thrifty, quick" in str(fault)


@pytest.mark.parametrize(("limit", "value"), [("tokens", 501), ("seconds", 9.0), ("flops", 1e12), ("cost", 0.6)])
def test_limits_that_contradict_the_effort_are_named_with_its_values(limit: str, value: float) -> None:
    fault = find_contradiction(Budget.model_validate({"effort": "thrifty", limit: value}), EFFORTS)
    assert fault is not None
    assert fault.field == f"budget.{limit}"
    assert "tokens 500, cost 0.5" in str(fault)
    assert find_contradiction(Budget(effort="thrifty", tokens=500, thinking_tokens=9), EFFORTS) is None


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
