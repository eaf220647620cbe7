"""Intervals, pass@N and comparisons against independently computed values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from reasoner.evaluation.comparisons import Results
from reasoner.evaluation.plan import EvaluationPlan, StrategyCase, parse_cases, split_pooled_and_live
from reasoner.evaluation.runs import Run
from reasoner.evaluation.statistics import (
    FLIPS,
    Bootstrap,
    CostCurve,
    Estimate,
    clustered_wilson_interval,
    pass_at_n,
    sign_flip_p_value,
    wilson_interval,
)
from tests.seeds import keep


def run(
    strategy: str,
    n: int,
    problem: int,
    correct: float,
    *,
    seed: int = 0,
    reached: float = 0.0,
    tokens: float = 10,
    verifier: float = 0,
    flops: float = 1.0,
    model: str = "policy",
) -> Run:
    return Run(
        model,
        strategy,
        n,
        seed,
        str(problem),
        correct,
        reached,
        1.0,
        n,
        tokens,
        0.0,
        verifier,
        flops,
        1.0,
        correct,
        0.0,
    )


def plan(strategies: str, *ns: int, against: tuple[str, ...] = ()) -> EvaluationPlan:
    pooled, live = split_pooled_and_live(parse_cases(strategies))
    return EvaluationPlan("policy", pooled, live, ns, ns, 1, against)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (150, 300), (300, 300)])
def test_the_interval_is_scipys_wilson_interval(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes / trials, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rounding_leaves_no_proportion_outside_of_its_interval(share: float) -> None:
    """An error bar of a chart would have a negative length."""
    for trials in range(1, 400):
        low, high = wilson_interval(share, trials)
        assert low <= share <= high


def test_with_one_seed_and_no_resampling_the_clustered_interval_is_a_plain_wilson_interval() -> None:
    values = np.array([1.0] * 30 + [0.0] * 170)
    assert clustered_wilson_interval(values, 200) == pytest.approx(wilson_interval(0.15, 199), abs=1e-3)
    assert clustered_wilson_interval(np.ones(50), 150) == wilson_interval(1.0, 50)


def _clusters(rng: np.random.Generator, problems: int, seeds: int) -> np.ndarray:
    """Return each problem's fraction of right runs; the difficulty has a Beta distribution with mean 0.3."""
    return rng.binomial(seeds, rng.beta(0.6, 1.4, size=problems)) / seeds


def test_intervals_over_problems_and_seeds_have_their_nominal_coverage() -> None:
    """Simulate 2000 evaluations of 60 problems with 3 seeds.

    With a coverage of 0.95 the true value lies in fewer than 1868 or more than 1930 of the intervals with p < 1e-3
    (binomial). Intervals that treat runs as independent have a coverage of 87 %.
    """
    rng, truth, trials = np.random.default_rng(keep(11, "a statistical claim")), 0.3, 2000
    held = naive = boot = 0
    for _ in range(trials):
        values = _clusters(rng, 60, 3)
        low, high = clustered_wilson_interval(values, 180)
        held += low <= truth <= high
        low, high = wilson_interval(float(values.mean()), 180)
        naive += low <= truth <= high
    assert 1868 <= held <= 1930
    assert naive < 1800
    bootstrap = Bootstrap(60, 1000)
    for _ in range(trials):
        estimate = Estimate.from_means(bootstrap.means(_clusters(rng, 60, 3)))
        boot += estimate.low <= truth <= estimate.high
    assert 1840 <= boot <= 1930  # percentile intervals of 60 clusters are slightly short: 0.94 in theory


def test_intervals_of_paired_differences_have_their_nominal_coverage() -> None:
    rng, trials, held = np.random.default_rng(keep(12, "a statistical claim")), 1000, 0
    bootstrap = Bootstrap(80, 1000)
    for _ in range(trials):
        difficulty = rng.beta(0.6, 1.4, size=80)
        ours, theirs = rng.binomial(3, np.sqrt(difficulty)) / 3, rng.binomial(3, difficulty) / 3
        estimate = Estimate.from_means(bootstrap.means(ours - theirs))
        truth = math.gamma(1.1) * math.gamma(2) / math.gamma(0.6) / math.gamma(2.5) - 0.3
        held += estimate.low <= truth <= estimate.high
    assert 915 <= held <= 975


def test_pass_at_n_is_the_fraction_of_subsets_with_a_right_sample() -> None:
    samples, right = 7, 2
    for n in range(1, samples + 1):
        subsets = list(itertools.combinations(range(samples), n))
        expected = sum(any(item < right for item in subset) for subset in subsets) / len(subsets)
        assert pass_at_n(n, samples, right) == pytest.approx(expected)


def test_a_curve_is_exact_at_its_points_interpolates_in_log_cost_and_is_flat_outside() -> None:
    bootstrap = Bootstrap(2, 10)
    points = [(np.full(2, 10.0), np.array([0.0, 0.4])), (np.full(2, 40.0), np.array([0.4, 0.8]))]
    curve = CostCurve(points, bootstrap)
    at = [float(curve.interpolate(np.full(11, cost))[0]) for cost in (1, 10, 20, 40, 100)]
    assert at == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
    cost, reached = curve.cost_of(np.full(11, 0.4))
    assert (float(cost[0]), bool(reached[0])) == (pytest.approx(20.0), True)
    cost, reached = curve.cost_of(np.full(11, 0.9))
    assert (float(cost[0]), bool(reached[0])) == (pytest.approx(40.0), False)


def test_rows_are_means_over_problems_and_seeds_in_the_order_of_the_plan() -> None:
    runs = [
        run("self_consistency", 4, problem, correct=float(problem < 3), seed=seed, tokens=40 + seed)
        for problem in range(4)
        for seed in range(2)
    ]
    runs += [run("pass@n", 4, problem, 1.0) for problem in range(4)]
    runs += [run("greedy", 1, problem, 0.0) for problem in range(4)]
    rows = Results(runs, plan("self_consistency,greedy", 4)).rows()
    assert [(row.strategy, row.n, row.accuracy) for row in rows] == [
        ("greedy", 1, 0.0),
        ("self_consistency", 4, 0.75),
        ("pass@n", 4, 1.0),
    ]
    assert (rows[1].tokens, rows[1].problems, rows[1].seeds) == (40.5, 4, 2)
    assert rows[1].low < 0.75 < rows[1].high


def test_majority_at_equal_tokens_gets_the_whole_bill_including_the_verifier() -> None:
    runs = [
        run("self_consistency", n, problem, accuracy, tokens=10 * n)
        for n, accuracy in ((1, 0.1), (2, 0.2), (4, 0.3), (8, 0.4))
        for problem in range(3)
    ]
    runs += [run("best_of_n", 2, problem, 0.9, tokens=20, verifier=20) for problem in range(3)]
    results = Results(runs, plan("best_of_n,self_consistency", 2))
    (claim,) = [item for item in results.comparisons() if item.what == "equal tokens"]
    assert (claim.strategy, claim.n, claim.over) == ("best_of_n", 2, "self_consistency")
    assert claim.difference == pytest.approx(0.9 - 0.3)
    (saving,) = results.savings()
    assert (saving.times, saving.bound) == (pytest.approx(80 / 40), True)


def test_a_search_that_stopped_early_is_compared_with_the_samples_that_its_bill_buys() -> None:
    runs = [run("pass@n", n, problem, n / 8, tokens=10 * n) for n in (1, 2, 4, 8) for problem in range(3)]
    runs += [run("beam", 4, problem, 0.0, reached=1.0, tokens=20, verifier=20) for problem in range(3)]
    (claim,) = Results(runs, plan("beam", 4)).comparisons()
    assert "rule" in claim.over
    assert claim.difference == pytest.approx(1.0 - 0.5)


def test_a_small_models_strategy_is_compared_with_a_large_models_greedy_answer_at_equal_flops() -> None:
    runs = [
        run("self_consistency", n, problem, accuracy, flops=float(n))
        for n, accuracy in ((1, 0.2), (2, 0.4), (4, 0.6))
        for problem in range(3)
    ]
    runs += [run("greedy", 1, problem, 0.5, flops=2.0, model="large") for problem in range(3)]
    results = Results(runs, plan("self_consistency", 1, 2, 4, against=("large",)))
    (claim,) = [item for item in results.comparisons() if item.what == "equal FLOPs"]
    assert (claim.over, claim.cost) == ("greedy of large", 1.0)
    assert claim.difference == pytest.approx(0.4 - 0.5)
    assert [row.model for row in results.rows()] == ["large", "policy", "policy", "policy"]


def test_searches_are_compared_with_best_of_n_with_the_same_number_of_samples() -> None:
    cases = (("beam", 0.75, 10), ("best_of_n", 0.5, 40))
    runs = [run(name, 4, problem, share, tokens=tokens) for name, share, tokens in cases for problem in range(3)]
    claims = [item for item in Results(runs, plan("best_of_n,beam", 4)).comparisons() if item.what == "equal n"]
    assert [(item.strategy, item.over, item.difference, item.cost) for item in claims] == [
        ("beam", "best_of_n", 0.25, 0.25)
    ]


def test_a_stopping_rule_is_compared_with_its_strategy_without_one() -> None:
    plain, stops = "self_consistency", "self_consistency:stop=beta"
    runs = [run(name, 4, problem, 0.5, tokens=cost) for name, cost in ((stops, 6), (plain, 24)) for problem in range(3)]
    claims = Results(runs, plan(f"{plain},{stops}", 4)).comparisons()
    (claim,) = [item for item in claims if (item.strategy, item.over, item.what) == (stops, plain, "equal n")]
    assert (claim.difference, claim.low, claim.high, claim.cost) == (0.0, 0.0, 0.0, 0.25)


def test_runs_of_different_problems_are_refused_instead_of_averaged() -> None:
    runs = [run("greedy", 1, 0, 1.0), run("greedy", 1, 1, 1.0), run("beam", 4, 0, 1.0)]
    with pytest.raises(ValueError, match="beam has no run of 1 problems"):
        Results(runs, plan("greedy,beam", 4))


def test_cases_are_parsed_with_their_parameters() -> None:
    assert parse_cases("beam:expansions=2:max_steps=9")[0] == StrategyCase(
        "beam:expansions=2:max_steps=9", "beam", (("expansions", 2), ("max_steps", 9))
    )
    (sure,) = parse_cases("auto:n=8:confidence=0.9")
    assert (sure.params, sure.confidence) == ((("n", 8),), 0.9)
    assert {case.label for case in parse_cases("all,beam:n=8")} > {"greedy", "beam", "beam:n=8"}
    for text, said in (
        ("mtcs", "known are greedy"),
        ("beam:expansion=2", "expansions"),
        ("beam:expansions", "KEY=VALUE"),
        (",", "no strategy"),
        ("auto:confidence=2", "from 0 to 1"),
        ("beam:confidence=0.5", "confidence"),
        ("beam:expansions=0", "expansions"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_cases(text)


def test_the_sign_flip_test_is_the_exact_sign_test_for_equal_differences() -> None:
    """With differences of one size the test is the two-sided binomial test, also where signs are sampled."""
    for right, wrong in ((5, 0), (6, 2), (8, 8), (14, 8)):
        differences = np.array([1.0] * right + [-1.0] * wrong + [0.0] * 7)
        total = right + wrong
        tail = sum(math.comb(total, k) for k in range(max(right, wrong), total + 1)) / 2**total
        exact = min(1.0, 2 * tail)
        sampled = 2**total > FLIPS
        error = 5 * math.sqrt(exact * (1 - exact) / FLIPS) + 1 / FLIPS if sampled else 1e-12
        assert sign_flip_p_value(differences) == pytest.approx(exact, abs=error)
    assert sign_flip_p_value(np.zeros(4)) == 1.0
