"""Matched evaluations on an engine without a model: budgets hold, runs resume, comparisons are paired."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import EngineUnavailable
from reasoner.budget.prices import Prices
from reasoner.evaluation import measure
from reasoner.evaluation.matched import report
from reasoner.evaluation.matched.measure import (
    BudgetTooSmall,
    MatchedContext,
    count_fitting,
    evaluate_matched,
    is_incomplete,
)
from reasoner.evaluation.matched.plan import MatchedPlan, Quantity, parse_budgets
from reasoner.evaluation.matched.replay import SCORED_CEILING
from reasoner.evaluation.matched.results import MatchedResults, find_front
from reasoner.evaluation.measure import EvaluationContext
from reasoner.evaluation.plan import CEILING, GREEDY, parse_cases, split_pooled_and_live
from reasoner.evaluation.runs import RUNS_FILE, EvaluationMismatch, Run, RunFile, collect_runs
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.sampling_spec import Sampling
from tests.reasoner.evaluation.test_evaluation import PLAIN, PRM, timeless
from tests.scripted import ScriptedEngine

SUITE = open_suite("words", limit=4)
PRICES = {"policy": Prices(prompt=1.0, cached=0.5, generated=4.0), "prm": Prices(verifier=2.0)}
STRATEGIES = "self_consistency,best_of_n,weighted_vote,beam,best_first,revise"


def plan(quantity: str, *budgets: float, strategies: str = STRATEGIES, seeds: int = 1) -> MatchedPlan:
    pooled, live = split_pooled_and_live(parse_cases(strategies))
    return MatchedPlan("policy", Quantity(quantity), budgets, pooled, live, seeds=seeds)


async def measured(
    wanted: MatchedPlan, engine: ScriptedEngine, file: RunFile | None = None, suite: Suite = SUITE
) -> list[Run]:
    with file or RunFile({}) as opened:
        setting = await EvaluationContext.of(
            suite, wanted.to_evaluation(), engine, PRM, Sampling(), 3, defaults=PLAIN, prices=PRICES
        )
        await evaluate_matched(MatchedContext(setting, wanted), opened, lambda stage, done, total: None)
        assert not is_incomplete(wanted, opened, len(suite.problems))
    return collect_runs(opened.items)


@pytest.mark.parametrize(
    ("quantity", "budgets"), [("tokens", (200, 700)), ("flops", (1.5e6, 5e6)), ("cost", (0.002, 0.006))]
)
async def test_no_run_spends_more_than_its_budget(quantity: str, budgets: tuple[float, ...]) -> None:
    wanted = plan(quantity, *budgets)
    runs = await measured(wanted, ScriptedEngine(held=0.5))
    limited = [run for run in runs if run.budget is not None]
    assert {(run.strategy, run.budget) for run in limited} == {
        (label, budget)
        for label in (*(case.label for case in wanted.cases), CEILING, SCORED_CEILING)
        for budget in budgets
    }
    for run in limited:
        spent = getattr(run, wanted.quantity.column)
        assert 0 < spent <= (run.budget or 0.0) * (1 + 1e-9), run
    assert [run.strategy for run in runs if run.budget is None and run.n == 1].count(GREEDY) == len(SUITE.problems)


async def test_a_live_strategy_has_as_many_samples_as_the_pool_says_that_its_budget_pays_for() -> None:
    runs = await measured(plan("tokens", 200, 900, strategies="beam,beam:n=3,first_finished"), ScriptedEngine())
    fitting = count_fitting(runs)
    assert fitting[CEILING, 900] > fitting[SCORED_CEILING, 900] > fitting[SCORED_CEILING, 200] > 0
    for budget in (200, 900):
        ns = {run.strategy: run.n for run in runs if run.budget == budget}
        assert ns["beam"] == max(1, round(fitting[SCORED_CEILING, budget]))
        assert ns["beam:n=3"] == 3
        assert ns["first_finished"] == round(fitting[CEILING, budget])


async def test_seconds_are_spent_live_and_the_pool_gives_the_curves() -> None:
    wanted = plan("seconds", 0.05, strategies="self_consistency,best_of_n")
    runs = await measured(wanted, ScriptedEngine())
    assert {run.strategy for run in runs if run.budget is not None} == {
        "self_consistency", "best_of_n", CEILING, SCORED_CEILING,
    }  # fmt: skip
    rows = MatchedResults(runs, wanted).rows()
    assert [row.strategy for row in rows] == ["greedy", "self_consistency", "best_of_n", CEILING]


async def test_a_matched_run_that_lost_its_engine_resumes_and_ends_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RETRY_DELAYS_SECONDS", ())
    wanted = plan("tokens", 300, 900, strategies="best_of_n,beam", seeds=2)
    whole = await measured(wanted, ScriptedEngine())
    for life in range(60):
        try:
            runs = await measured(wanted, ScriptedEngine(order=life, die_after=170), RunFile({"a": 1}, tmp_path))
        except EngineUnavailable:
            continue
        break
    assert life > 2
    assert timeless(runs) == timeless(whole)
    assert len((tmp_path / RUNS_FILE).read_text().splitlines()) == 1 + len(SUITE.problems) * wanted.count_stages()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (plan("flops", 300, 900), 'matched is "tokens" there and "flops" here'),
        (plan("tokens", 300), r"budgets is \[300, 900\] there and \[300\] here"),
        (plan("tokens", 300, 900, strategies="beam"), r'strategies is \["self.* there and \["beam"\] here'),
    ],
)
def test_the_folder_of_another_matched_run_is_refused_with_both(
    tmp_path: Path, other: MatchedPlan, message: str
) -> None:
    with RunFile(plan("tokens", 300, 900).document(), tmp_path):
        pass
    with pytest.raises(EvaluationMismatch, match=message), RunFile(other.document(), tmp_path):
        pass


async def test_a_budget_below_one_sample_is_refused_with_the_least_and_leaves_no_file(tmp_path: Path) -> None:
    wanted = plan("tokens", 3, 900)
    with pytest.raises(BudgetTooSmall, match=r"3 tokens do not pay for one sample with its score, which takes \d+ on"):
        await measured(wanted, ScriptedEngine(), RunFile({}, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("quantity", "text", "message"),
    [
        ("tokens", "many", "'many' is no number: give tokens, such as"),
        ("tokens", "500,", "'' is no number"),
        ("tokens", "0", "'0' is no budget of tokens: Input should be greater than or equal to 1"),
        ("tokens", "1.5", "'1.5' is no budget of tokens"),
        ("tokens", "1e9", "'1e9' is no budget of tokens: Input should be less than"),
        ("seconds", "-1", "greater than 0"),
        ("flops", "nan", "'nan' is no budget of flops"),
        ("cost", "inf", "'inf' is no budget of cost"),
    ],
)
def test_budgets_that_no_job_can_have_are_refused(quantity: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_budgets(Quantity(quantity), text)
    assert parse_budgets(Quantity.TOKENS, "8_000, 500,500") == (500.0, 8000.0)


def made(
    strategy: str, problem: int, correct: float, *, seed: int = 0, budget: float | None = 10.0, **more: Any
) -> Run:
    run = Run(
        "policy", strategy, 1, seed, str(problem), correct, correct, 1.0, 1.0, 10.0, 0.0, 0.0, 1.0, 1.0, correct, 0.0
    )
    return replace(run, budget=budget, **more)


def results(scores: Mapping[str, list[tuple[float, ...]]]) -> MatchedResults:
    """Return results of ``scores[strategy][problem][seed]`` at a budget of 10 tokens."""
    runs = [
        made(strategy, problem, correct, seed=seed, budget=None if strategy == GREEDY else 10.0)
        for strategy, problems in scores.items()
        for problem, seeds in enumerate(problems)
        for seed, correct in enumerate(seeds)
    ]
    return MatchedResults(runs, plan("tokens", 10.0, strategies="self_consistency,best_of_n"))


def test_differences_are_paired_and_their_interval_is_that_of_all_resamples_of_problems() -> None:
    ours, theirs = [(1, 1), (1, 0), (0, 1), (1, 1)], [(1, 1), (0, 0), (0, 0), (1, 0)]
    shown = results({GREEDY: [(1,), (0,), (0,), (1,)], "self_consistency": theirs, "best_of_n": ours, CEILING: ours})
    differences = np.array([np.mean(a) - np.mean(b) for a, b in zip(ours, theirs, strict=True)])
    resamples = np.sort([differences[list(chosen)].mean() for chosen in itertools.product(range(4), repeat=4)])
    [found] = [item for item in shown.comparisons() if (item.strategy, item.over) == ("best_of_n", "self_consistency")]
    assert found.difference == differences.mean() == 0.375
    assert (found.low, found.high) == tuple(np.quantile(resamples, (0.025, 0.975), method="inverted_cdf"))
    # Three of the four problems differ, all in one direction: two of the eight assignments of signs are as extreme.
    assert found.p_value == 2 / 8


def test_the_selection_gap_is_what_an_ideal_choice_would_add() -> None:
    shown = results(
        {GREEDY: [(0,)] * 3, "self_consistency": [(0,)] * 3, "best_of_n": [(1,), (0,), (0,)], CEILING: [(1,)] * 3}
    )
    for run in shown._scores["best_of_n", 10.0, 0].runs:
        object.__setattr__(run, "reached", 1.0)
    row = next(row for row in shown.rows() if row.strategy == "best_of_n")
    assert (row.accuracy, row.reached, row.gap.value) == (1 / 3, 1.0, pytest.approx(2 / 3))
    assert (row.gap.low, row.gap.high) == pytest.approx((0.0, 1.0), abs=0.34)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=9))
def test_the_front_has_the_points_that_are_the_best_at_their_cost_and_below(points: list[tuple[int, int]]) -> None:
    front = find_front([(float(cost), float(value)) for cost, value in points])
    for index, (cost, value) in enumerate(points):
        best = max(other for paid, other in points if paid <= cost)
        cheapest = min(paid for paid, other in points if other == best and paid <= cost)
        assert (index in front) == (value == best and cost == cheapest)


async def test_the_files_show_every_strategy_at_every_budget_beside_its_spending(tmp_path: Path) -> None:
    wanted = plan("tokens", 300, 900)
    shown = MatchedResults(await measured(wanted, ScriptedEngine()), wanted)
    settings = {"model": "policy", "seeds": 1}
    document = {
        "suite": "words",
        "problems": 4,
        "matched": "tokens",
        **shown.document(),
        "left_out": [{"problem": "<p>", "error": "too & long"}],
        "origin": {"command": "reasoner eval", "processor": "<m>"},
        "settings": settings,
    }
    report.write(tmp_path, shown, document, "reasoner eval words")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert {(row["strategy"], row["budget"]) for row in stored["rows"]} == {
        ("greedy", None), *((name, budget) for name in (*STRATEGIES.split(","), CEILING) for budget in (300, 900)),
    }  # fmt: skip
    assert {point["strategy"] for point in stored["curves"]} == {"pass@k", "maj@k", "best_of_n@k", "weighted_vote@k"}
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} | 900 |" in table for name in STRATEGIES.split(","))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(
        r"<script|<link|https?://|url\(|@import| src=| on\w+=", page
    )  # nothing is loaded, nothing runs
    assert page.count("<svg") == 2
    assert all(f">{name}</text>" in page for name in (*STRATEGIES.split(","), "greedy", "maj@k", "pass@k"))
    assert "&lt;p&gt;: too &amp; long" in page
    assert "&lt;m&gt;" in page
    ElementTree.fromstring(re.search(r"<svg.*?</svg>", page, re.DOTALL)[0])  # type: ignore[index]
