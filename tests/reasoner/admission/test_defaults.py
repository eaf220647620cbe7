"""What an operator says of a model goes where a job says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from reasoner.admission.defaults import ModelDefaults, apply_defaults
from reasoner.admission.effort import DEFAULT_EFFORTS, Effort, apply_effort
from reasoner.admission.validation import JobRefused, check_job
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import JobSpec

DEFAULTS = ModelDefaults.model_validate(
    {
        "sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 300},
        "budget": {"tokens": 900},
        "strategy": {"name": "weighted_vote", "n": 8},
    }
)


def applied(defaults: ModelDefaults = DEFAULTS, **job: Any) -> JobSpec:
    return apply_defaults(JobSpec.model_validate({"problem": "1 + 1?", **job}), defaults, DEFAULT_EFFORTS)


def test_a_job_that_says_nothing_gets_all_of_it() -> None:
    job = applied()
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.max_tokens) == (
        0.6,
        0.95,
        0,
        300,
    )
    assert job.budget == Budget(tokens=900)
    assert (job.strategy.name, job.strategy.params["n"]) == ("weighted_vote", 8)


def test_what_a_job_says_goes_before_it_even_where_it_is_what_everybody_has_anyway() -> None:
    job = applied(sampling={"temperature": 1.0}, budget={"seconds": 3}, strategy={"name": "best_of_n"})
    assert (job.sampling.temperature, job.sampling.top_p) == (1.0, 0.95)
    assert job.budget == Budget(seconds=3)
    assert job.strategy.name == "best_of_n"


def test_nothing_else_of_the_job_changes() -> None:
    job = JobSpec.model_validate(
        {
            "messages": [{"role": "user", "content": "?"}],
            "verifier": {"kind": "json_schema", "json_schema": {"type": "object"}},
            "metadata": {"a": "b"},
            "seed": 4,
            "strategy": {"name": "best_of_n", "n": 3},
        }
    )
    then = apply_defaults(job, DEFAULTS, DEFAULT_EFFORTS)
    same = set(JobSpec.model_fields) - {"sampling", "budget"}
    assert then.model_dump(include=same) == job.model_dump(include=same)
    assert then.model_fields_set >= job.model_fields_set
    assert apply_defaults(job, ModelDefaults(), DEFAULT_EFFORTS).model_dump() == job.model_dump()


def test_an_effort_that_the_job_names_brings_its_own_strategy_and_one_without_does_not() -> None:
    efforts = DEFAULT_EFFORTS | {"plain": Effort(tokens=77)}

    def strategy(effort: str) -> str:
        job = JobSpec.model_validate({"problem": "?", "budget": {"effort": effort}})
        return apply_effort(apply_defaults(job, DEFAULTS, efforts), efforts).strategy.name

    assert strategy("minimal") == "greedy"
    assert strategy("plain") == "weighted_vote"


def test_a_default_effort_gives_its_limits_and_the_models_own_strategy_goes_before_its() -> None:
    named = ModelDefaults.model_validate({"budget": {"effort": "minimal"}})
    assert apply_effort(applied(named), DEFAULT_EFFORTS).strategy.name == "greedy"
    both = ModelDefaults.model_validate({"budget": {"effort": "minimal"}, "strategy": "beam"})
    job = apply_effort(applied(both), DEFAULT_EFFORTS)
    assert (job.strategy.name, job.budget.tokens) == ("beam", DEFAULT_EFFORTS["minimal"].tokens)


def test_a_default_strategy_that_does_not_go_with_the_jobs_verifier_is_refused() -> None:
    job = applied(ModelDefaults.model_validate({"strategy": "beam"}), verifier={"kind": "exact", "expected": "2"})
    with pytest.raises(JobRefused, match="needs a verifier of single steps"):
        check_job(job)
