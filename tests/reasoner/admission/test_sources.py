"""Each field of a job is from the first source that has it; sources are named in the order of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from reasoner.admission.check import check_spec
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.effort import DEFAULT_EFFORTS, Effort
from reasoner.admission.refusal import JobRefused
from reasoner.admission.sources import SOURCES, Merged, Submission, merge_sources
from reasoner.budget.spec import Budget
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import PrmVerifier

DEFAULTS = ModelDefaults.model_validate(
    {
        "sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 300},
        "budget": {"tokens": 900},
        "strategy": {"name": "weighted_vote", "n": 8},
    }
)
EFFORTS = DEFAULT_EFFORTS | {
    "thrifty": Effort.model_validate({"tokens": 500, "cost": 0.5, "strategy": {"name": "beam", "n": 4}}),
    "quick": Effort(seconds=2.5),
    "brief": Effort(tokens=900, thinking_tokens=64),
    "pairs": Effort.model_validate({"tokens": 900, "strategy": "tournament"}),
}
PRM = PrmVerifier(model="prm")


def merge(
    profile: ModelDefaults | Mapping[str, Any], *, efforts: Mapping[str, Effort] = EFFORTS, **fields: Any
) -> Merged:
    request = JobRequest.model_validate({"problem": "1 + 1?"} | fields)
    defaults = ModelDefaults.model_validate(profile)
    return merge_sources(Submission(request, "policy", defaults, PRM, efforts, {"tokens": 5000}))


def resolve(profile: ModelDefaults | Mapping[str, Any], **fields: Any) -> JobSpec:
    return merge(profile, **fields).spec


def test_a_job_without_settings_gets_all_defaults() -> None:
    job = resolve(DEFAULTS)
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.95, None, 300)
    assert job.budget == Budget(tokens=900)
    assert (job.strategy.name, job.strategy.params["n"]) == ("weighted_vote", 8)


def test_settings_of_a_job_override_the_defaults_even_if_equal_to_the_schemas_default() -> None:
    job = resolve(DEFAULTS, sampling={"temperature": 1.0}, budget={"seconds": 3}, strategy={"name": "best_of_n"})
    assert (job.sampling.temperature, job.sampling.top_p) == (1.0, 0.95)
    assert job.budget == Budget(seconds=3)
    assert job.strategy.name == "best_of_n"


def test_a_default_limit_of_thoughts_shrinks_to_a_smaller_budget_and_one_of_the_job_is_refused() -> None:
    profile = {"sampling": {"thinking_tokens": 600}}
    efforts = {"brief": Effort(tokens=50)}
    for budget, expected in (({"tokens": 400}, 400), ({"tokens": 900}, 600), ({"effort": "brief"}, 50), ({}, 600)):
        merged = merge(profile, efforts=efforts, budget=budget)
        assert merged.spec.sampling.thinking_tokens == expected
        check_spec(merged)
    with pytest.raises(JobRefused, match="a thought of 500 tokens does not fit into the job's 400"):
        check_spec(merge(profile, budget={"tokens": 400}, sampling={"thinking_tokens": 500}))
    with pytest.raises(JobRefused, match="a thought of 500 tokens does not fit into the job's 400"):
        check_spec(merge(profile, budget={"tokens": 400, "thinking_tokens": 500}))


def test_other_fields_of_the_job_do_not_change() -> None:
    fields: dict[str, Any] = {
        "problem": None,
        "messages": [{"role": "user", "content": "?"}],
        "verifier": {"kind": "json_schema", "json_schema": {"type": "object"}},
        "metadata": {"a": "b"},
        "seed": 4,
        "strategy": {"name": "best_of_n", "n": 3},
    }
    assert resolve(DEFAULTS, **fields).model_dump(exclude={"sampling", "budget"}) == resolve({}, **fields).model_dump(
        exclude={"sampling", "budget"}
    )


def test_a_source_sets_no_field_that_the_reference_does_not_name() -> None:
    fields = {name: {source.name for source in SOURCES if name in source.sets} for name in JobSpec.model_fields}
    for job in (
        {},
        {"candidates": ["x"]},
        {"budget": {"effort": "thrifty"}, "constraint": {"json_object": True}},
        {"models": [{"model": "policy"}, {"model": "other"}], "verifier": None},
    ):
        for profile in ({}, DEFAULTS, {"budget": {"effort": "minimal"}, "system": "s", "answer": "text"}):
            origins = merge(profile, **job).origins
            assert all(origin in fields[name] for name, origin in origins.items() if "." not in name)


def test_a_named_effort_replaces_the_default_strategy_only_if_it_has_its_own() -> None:
    for effort, strategy in (("minimal", "greedy"), ("quick", "weighted_vote")):
        assert resolve(DEFAULTS, budget={"effort": effort}).strategy.name == strategy


def test_a_default_effort_sets_the_limits_and_the_models_strategy_overrides_its_strategy() -> None:
    assert resolve({"budget": {"effort": "minimal"}}).strategy.name == "greedy"
    job = resolve({"budget": {"effort": "minimal"}, "strategy": "beam"})
    assert (job.strategy.name, job.budget.tokens) == ("beam", DEFAULT_EFFORTS["minimal"].tokens)


def test_a_default_strategy_incompatible_with_the_jobs_verifier_is_refused_as_the_models() -> None:
    exact = {"kind": "exact", "expected": "2"}
    for profile, owner in (({"strategy": "beam"}, "model's default"), ({}, "effort's")):
        budget = {} if profile else {"effort": "thrifty"}
        with pytest.raises(JobRefused, match=f"verifier of single steps.*; this strategy is the {owner} here: name"):
            check_spec(merge(profile, verifier=exact, budget=budget))


def test_a_comparing_strategy_of_any_source_gets_a_verifier_that_compares() -> None:
    assert resolve({}, strategy={"name": "tournament"}).verifier.kind == "pairwise"  # type: ignore[union-attr]
    assert resolve({"strategy": "tournament"}).verifier.kind == "pairwise"  # type: ignore[union-attr]
    assert resolve({}, budget={"effort": "pairs"}).verifier.kind == "pairwise"  # type: ignore[union-attr]
    assert resolve({"budget": {"effort": "pairs"}}).verifier.kind == "pairwise"  # type: ignore[union-attr]


def test_an_effort_sets_limits_and_a_strategy_for_jobs_without_one() -> None:
    job = resolve({}, budget={"effort": "thrifty"})
    assert job.budget.model_dump(exclude_none=True) == {"tokens": 500, "cost": 0.5, "effort": "thrifty"}
    assert (job.strategy.name, job.strategy.params["n"]) == ("beam", 4)
    assert resolve({}, budget={"effort": "thrifty"}, strategy={"name": "greedy"}).strategy.name == "greedy"
    assert resolve({}, budget={"effort": "quick"}).strategy == resolve({}).strategy


def test_an_effort_votes_with_as_many_samples_where_there_is_no_verifier() -> None:
    for effort, samples in (("high", 64), ("thrifty", 4)):
        strategy = resolve({}, budget={"effort": effort}, verifier=None).strategy
        assert (strategy.name, strategy.params) == ("self_consistency", {"n": samples})


def test_of_the_limits_of_an_effort_and_of_a_job_for_thoughts_the_lower_one_holds() -> None:
    for name, own, expected in (("brief", None, 64), ("brief", 32, 32), ("brief", 99, 64), ("quick", 99, 99)):
        job = resolve({}, budget={"effort": name, "thinking_tokens": own})
        assert job.thinking_tokens == expected
        assert job.budget.tokens == EFFORTS[name].tokens


def test_a_resolved_job_can_be_submitted_again() -> None:
    job = resolve({}, budget={"effort": "thrifty"}, answer={"instruct": False})
    assert resolve(DEFAULTS, **job.model_dump()) == job
