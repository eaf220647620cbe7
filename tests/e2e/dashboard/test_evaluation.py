"""An evaluation on the dashboard, from the files that ``reasoner eval`` writes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser, expect

from reasoner.evaluation import report
from reasoner.evaluation.comparisons import Results
from reasoner.evaluation.plan import EvaluationPlan, parse_cases, split_pooled_and_live
from reasoner.evaluation.runs import RUNS_FILE, FinishedItem, Run, RunFile
from tests.e2e.dashboard.service import WAIT, Service, expect_count, open_page, overflowing_elements
from tests.seeds import shift

NUM_PROBLEMS = 12
SETTINGS = {"model": "policy", "seeds": 1}


def write_evaluation(folder: Path) -> Results:
    """Write the files of an evaluation of two strategies, as the command does."""
    pooled, live = split_pooled_and_live(
        parse_cases("self_consistency,best_of_n", has_verifier=True), has_several_models=False
    )
    plan, draw = EvaluationPlan("policy", pooled, live=live, ns=(1, 4), live_ns=(1, 4)), random.Random(shift(5))
    blank = Run(
        "policy",
        "",
        0,
        0,
        "",
        0.0,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        flops=1e6,
        seconds=0.5,
        correct_strict=0.0,
        flexible=0.0,
    )
    with RunFile({"suite": "words", **SETTINGS}, folder) as file:
        for number in range(NUM_PROBLEMS):
            problem = f"word {number}"
            runs = [
                replace(
                    blank, strategy=case.label, n=n, problem=problem, correct=draw.random(), tokens=50.0 * n + number
                )
                for case in pooled
                for n in plan.ns
            ]
            file.add(FinishedItem("pool", 0, problem, tuple(runs)))
        results = Results([run for item in file.items for run in item.runs], plan)
    document = {"suite": "words", "problems": NUM_PROBLEMS, **results.document(), "left_out": [], "settings": SETTINGS}
    report.write(folder, results, document, "reasoner eval words")
    return results


def test_an_evaluation_shows_accuracy_against_tokens_and_each_problem(
    browser: Browser, service: Service, tmp_path: Path
) -> None:
    rows = write_evaluation(tmp_path).rows()
    files = [tmp_path / "results.json", tmp_path / RUNS_FILE]
    best = max(rows, key=lambda row: row.accuracy)
    for width in (1440, 375):
        with open_page(browser, f"{service.url}/#evaluation", width=width) as page:
            page.set_input_files("#results", [files[1]])
            expect(page.locator("#suite")).to_have_text("words, 12 problems, policy", timeout=WAIT)
            expect(page.locator("#curves .interval")).to_have_count(0, timeout=WAIT)  # runs alone have none
            page.set_input_files("#results", files)
            expect(page.locator("#curves .interval").first).to_be_attached(timeout=WAIT)
            expect_count(page.locator("#curves circle"), len(rows))
            expect(page.locator(".series [aria-pressed=true]")).to_have_text(best.strategy, timeout=WAIT)
            table = page.locator("#curves table").first.locator("tbody tr")
            shown = [row.split("\t") for row in table.all_inner_texts()]
            assert [(row[0], int(row[1]), row[2], row[3]) for row in shown] == [
                (row.strategy, row.n, f"{row.accuracy:.3f}", f"{row.low:.3f} to {row.high:.3f}") for row in rows
            ]
            other = next(row.strategy for row in rows if row.strategy != best.strategy)
            page.locator(f".series [data-strategy='{other}']").click()
            expect(page.locator(".chart .label.chosen")).to_have_text(other, timeout=WAIT)
            expect_count(page.locator("#curves table").nth(1).locator("tbody tr"), NUM_PROBLEMS)
            outside = [html for html in overflowing_elements(page) if not html.startswith(("<t", "<span", "<code"))]
            assert outside == []  # wide tables scroll within their panels


def test_a_file_that_is_no_evaluation_is_named_with_what_would_be_right(
    browser: Browser, service: Service, tmp_path: Path
) -> None:
    for name, text in (("results.json", '{"rows": [{"case": 1}]}'), ("other.json", "not json"), ("runs.jsonl", "{}")):
        (tmp_path / name).write_text(text)
        with open_page(browser, f"{service.url}/#evaluation") as page:
            page.set_input_files("#results", [tmp_path / name])
            expect(page.locator("#curves .refused")).to_contain_text(name, timeout=WAIT)
            expect(page.locator("#curves .refused")).to_contain_text("reasoner eval --out FOLDER", timeout=WAIT)
