"""An operator's defaults for a model apply where a job leaves a field unset."""

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


def test_a_job_without_settings_gets_all_defaults() -> None:
    job = applied()
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.max_tokens) == (
        0.6,
        0.95,
        None,
        300,
    )
    assert job.budget == Budget(tokens=900)
    assert (job.strategy.name, job.strategy.params["n"]) == ("weighted_vote", 8)


def test_settings_of_a_job_override_the_defaults_even_if_equal_to_the_schemas_default() -> None:
    job = applied(sampling={"temperature": 1.0}, budget={"seconds": 3}, strategy={"name": "best_of_n"})
    assert (job.sampling.temperature, job.sampling.top_p) == (1.0, 0.95)
    assert job.budget == Budget(seconds=3)
    assert job.strategy.name == "best_of_n"


def test_a_default_limit_of_thoughts_shrinks_to_a_smaller_budget_and_one_of_the_job_is_refused() -> None:
    defaults = ModelDefaults.model_validate({"sampling": {"thinking_tokens": 600}})
    for budget, expected in (({"tokens": 400}, 400), ({"tokens": 900}, 600), ({"effort": "brief"}, 50), ({}, 600)):
        job = JobSpec.model_validate({"problem": "?", "budget": budget})
        job = apply_defaults(job, defaults, {"brief": Effort(tokens=50)})
        assert job.sampling.thinking_tokens == expected
        check_job(job)
    with pytest.raises(JobRefused, match="a thought of 500 tokens does not fit into the job's 400"):
        check_job(applied(defaults, budget={"tokens": 400}, sampling={"thinking_tokens": 500}))


def test_other_fields_of_the_job_do_not_change() -> None:
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


def test_a_named_effort_replaces_the_default_strategy_only_if_it_has_its_own() -> None:
    efforts = DEFAULT_EFFORTS | {"plain": Effort(tokens=77)}

    def strategy(effort: str) -> str:
        job = JobSpec.model_validate({"problem": "?", "budget": {"effort": effort}})
        return apply_effort(apply_defaults(job, DEFAULTS, efforts), efforts).strategy.name

    assert strategy("minimal") == "greedy"
    assert strategy("plain") == "weighted_vote"


def test_a_default_effort_sets_the_limits_and_the_models_strategy_overrides_its_strategy() -> None:
    named = ModelDefaults.model_validate({"budget": {"effort": "minimal"}})
    assert apply_effort(applied(named), DEFAULT_EFFORTS).strategy.name == "greedy"
    both = ModelDefaults.model_validate({"budget": {"effort": "minimal"}, "strategy": "beam"})
    job = apply_effort(applied(both), DEFAULT_EFFORTS)
    assert (job.strategy.name, job.budget.tokens) == ("beam", DEFAULT_EFFORTS["minimal"].tokens)


def test_a_default_strategy_incompatible_with_the_jobs_verifier_is_refused() -> None:
    job = applied(ModelDefaults.model_validate({"strategy": "beam"}), verifier={"kind": "exact", "expected": "2"})
    with pytest.raises(JobRefused, match="needs a verifier of single steps"):
        check_job(job)
