"""Intervals and pass@N against independent truth."""

from __future__ import annotations

import itertools

import pytest
from scipy.stats import binomtest

from reasoner.evaluation import Run
from reasoner.statistics import comparisons, pass_at, rows, wilson


def run(
    strategy: str, n: int, problem: int, *, correct: bool, right: int = 0, tokens: int = 10, verifier: int = 0
) -> Run:
    return Run(strategy, n, str(problem), correct, right > 0, n, right, tokens, verifier, 1.0)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (150, 300), (300, 300)])
def test_the_interval_is_scipys_wilson_interval(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_pass_at_n_is_the_share_of_subsets_that_hold_a_right_sample() -> None:
    samples, right = 7, 2
    for n in range(1, samples + 1):
        subsets = list(itertools.combinations(range(samples), n))
        expected = sum(any(item < right for item in subset) for subset in subsets) / len(subsets)
        assert pass_at(n, samples, right) == pytest.approx(expected)


def test_rows_hold_means_over_problems_and_pass_at_n_costs_its_samples() -> None:
    runs = [run("self_consistency", 4, problem, correct=problem < 3, right=2, tokens=40) for problem in range(4)]
    table = {(row.strategy, row.n): row for row in rows(runs)}
    assert table["self_consistency", 4].accuracy == 0.75
    assert table["pass@n", 4].accuracy == 1.0
    assert table["pass@n", 4].tokens == 40


def test_the_rule_comparison_grants_sampling_as_many_samples_as_the_beams_whole_bill_buys() -> None:
    pool = [run("self_consistency", 8, problem, correct=False, right=1, tokens=80) for problem in range(3)]
    beam = [run("beam", 4, problem, correct=True, right=1, tokens=20, verifier=20) for problem in range(3)]
    (claim,) = [claim for claim in comparisons(pool + beam, 4) if "rule" in claim.name]
    assert "4.0 samples" in claim.name
    assert claim.difference == pytest.approx(1.0 - 0.5)


def test_a_paired_difference_of_identical_runs_is_zero_with_an_empty_interval() -> None:
    runs = [run(name, 4, problem, correct=problem % 2 == 0) for name in ("beam", "best_of_n") for problem in range(10)]
    (claim,) = [claim for claim in comparisons(runs, 4) if claim.name.startswith("beam n=4 over best")]
    assert (claim.difference, claim.low, claim.high) == (0.0, 0.0, 0.0)
