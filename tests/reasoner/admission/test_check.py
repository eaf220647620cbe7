"""A job with incompatible parts is refused, with a message that names the valid choices."""

from __future__ import annotations

import pytest

from reasoner.admission.refusal import JobRefused
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.spec import JobSpec
from tests.specs import build_spec

EXACT = {"kind": "exact", "expected": "1"}


def job(**fields: object) -> JobSpec:
    return build_spec({"problem": "2 + 2?"} | fields)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"name": "mtcs"}, "known are greedy"),
        ({"name": "beam", "n": 0}, "greater than or equal to 1"),
        ({"name": "beam", "n": MAX_N + 1}, f"less than or equal to {MAX_N}"),
        ({"name": "greedy", "n": 4}, "its parameters: none"),
    ],
)
def test_an_unknown_strategy_or_parameter_is_refused(strategy: dict[str, object], message: str) -> None:
    with pytest.raises(JobRefused, match=message) as refused:
        job(strategy=strategy)
    assert (refused.value.code, refused.value.field) == ("invalid-request", "strategy")


def test_a_job_without_a_verifier_votes_and_cannot_name_a_strategy_that_needs_one() -> None:
    job(verifier=None)
    with pytest.raises(JobRefused, match=r"'beam' needs a verifier.*use self_consistency"):
        job(verifier=None, strategy={"name": "beam"})


@pytest.mark.parametrize("verifier", [EXACT, {"kind": "outcome"}])
def test_a_step_guided_strategy_refuses_a_verifier_of_whole_solutions(verifier: dict[str, object]) -> None:
    with pytest.raises(
        JobRefused, match=rf"'beam' needs a verifier of single steps, and '{verifier['kind']}'.*use one of prm, judge"
    ):
        job(strategy={"name": "beam"}, verifier=verifier)
    job(strategy={"name": "self_consistency"}, verifier=verifier)


def test_a_confidence_is_refused_by_a_strategy_without_early_stopping() -> None:
    with pytest.raises(JobRefused, match=r"strategy 'greedy' cannot stop by 'confidence'.* use one of .*auto"):
        job(strategy={"name": "greedy"}, confidence=0.9)
