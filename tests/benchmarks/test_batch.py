"""Batch benchmark: both modes run the same problems with the same tokens, and the report counts their results."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.batch.measure import Plan, Solved, measure, mixed
from benchmarks.batch.report import document, markdown
from tests.scripted import ScriptedEngine


def test_problems_alternate_between_both_suites() -> None:
    problems = mixed(7)
    assert [problem.suite for problem in problems[:4]] == ["countdown", "words", "countdown", "words"]
    assert len({problem.id for problem in problems}) == len(problems) == 7


async def test_each_mode_keeps_its_budget_on_the_same_problems() -> None:
    plan, seen = Plan(problems=6, tokens=(150, 400), seeds=(0, 1)), Counter[str]()
    found = await measure(plan, ScriptedEngine(context=2048), lambda what: seen.update([what]))
    assert len(found) == plan.runs == sum(seen.values()) == 48
    for tokens in plan.tokens:
        for seed in plan.seeds:
            ways = {
                way: [one for one in found if (one.way, one.tokens, one.seed) == (way, tokens, seed)]
                for way in ("even", "shared")
            }
            assert [one.problem for one in ways["even"]] == [one.problem for one in ways["shared"]]
            assert all(one.spent <= tokens for one in ways["even"])
            assert sum(one.spent for one in ways["shared"]) <= 6 * tokens


def test_the_report_counts_and_compares_by_problem() -> None:
    plan = Plan(problems=4, tokens=(100,), seeds=(0, 1))
    even, shared = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]  # two seeds of each problem, one after the other
    found = [
        Solved("even" if way == 0 else "shared", 100, place % 2, "words", f"p{place // 2}", bool(right), 90)
        for way, rights in enumerate((even, shared))
        for place, right in enumerate(rights)
    ]
    told = document(plan, found, "command")
    rows = {row["way"]: row for row in told["rows"]}
    assert (rows["even"]["accuracy"], rows["shared"]["accuracy"]) == (3 / 8, 5 / 8)
    assert rows["shared"]["gain"] == pytest.approx(1 / 4)
    assert 0.0 <= rows["shared"]["gain_low"] < 0.25 < rows["shared"]["gain_high"] <= 0.5
    assert rows["even"]["spent"] == 90
    assert json.loads(json.dumps(told)) == told
    assert "| 100 | shared | 0.625 |" in markdown(told)
