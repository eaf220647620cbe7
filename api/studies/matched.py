"""``reasoner eval --matched``: strategies at equal budgets, as a table, JSON, a picture and a page."""

from __future__ import annotations

import shlex
import sys

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from api.cli.console import print_json, result_console
from api.studies.eval_setting import EvalSetting, list_failures
from reasoner.evaluation.matched import report
from reasoner.evaluation.matched.measure import BudgetTooSmall, MatchedContext, evaluate_matched, is_incomplete
from reasoner.evaluation.matched.plan import MatchedPlan
from reasoner.evaluation.matched.results import MatchedResults
from reasoner.evaluation.measure import Advance, EvaluationContext
from reasoner.evaluation.origin import describe_origin
from reasoner.evaluation.runs import RunFile, collect_runs


def evaluate_at_equal_budgets(setting: EvalSetting, plan: MatchedPlan) -> None:
    """Measure a matched plan, and write and print what it shows. Raises ``typer.BadParameter``."""
    conditions = setting.describe_conditions(plan.seeds)

    async def measure(context: EvaluationContext, file: RunFile, advance: Advance) -> None:
        await evaluate_matched(MatchedContext(context, plan), file, advance)

    try:
        file = setting.run(
            plan.to_evaluation(),
            {**conditions, **setting.identify_suite(), **plan.document()},
            num_stages=plan.count_stages(),
            is_incomplete=lambda file: is_incomplete(plan, file, len(setting.suite.problems)),
            measure=measure,
        )
    except BudgetTooSmall as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from None
    failures = list_failures(Console(stderr=True), file)
    results = MatchedResults([run for run in collect_runs(file.items) if run.problem not in failures], plan)
    command = shlex.join(["reasoner", *sys.argv[1:]])
    document = {
        "suite": setting.suite.name,
        "problems": len(results.problems),
        "matched": str(plan.quantity),
        "budgets": list(plan.budgets),
        "baseline": plan.baseline,
        **results.document(),
        "left_out": [{"problem": problem, "error": reason} for problem, reason in failures.items()],
        "settings": conditions,
        "origin": describe_origin(command),
    }
    if setting.out is not None:
        report.write(setting.out, results, document, command)
    if setting.as_json:
        print_json(document)
    else:
        _print(result_console(), results)


def _print(console: Console, results: MatchedResults) -> None:
    for headings, rows in report.list_tables(results):
        view = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            view.add_row(*row)
        console.print(view)
