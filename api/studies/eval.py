"""``reasoner eval``: accuracy against compute of several strategies on a suite, as a table, JSON and a chart."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from api.cli.console import print_json, result_console
from api.cli.options import AsJson, Model, expand_options, load_with
from api.studies.eval_options import MatchedOptions, PlanOptions
from api.studies.eval_setting import EvalSetting, list_failures
from api.studies.matched import evaluate_at_equal_budgets
from api.studies.select import evaluate_candidates
from reasoner.evaluation import report
from reasoner.evaluation.comparisons import Results
from reasoner.evaluation.matched.plan import MatchedPlan, Quantity
from reasoner.evaluation.measure import evaluate, is_incomplete
from reasoner.evaluation.origin import describe_origin
from reasoner.evaluation.plan import EvaluationPlan
from reasoner.evaluation.runs import RUNS_FILE, collect_runs
from reasoner.evaluation.suites.registry import BUNDLED, open_suite
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.tool_specs import PythonTool

DEFAULT_CONCURRENCY = 8


@expand_options
def evaluate_suite(
    options: PlanOptions,
    matched: MatchedOptions,
    suite: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(BUNDLED)}, a file of problems or reasoning-gym:TASK."),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a suite: a file of questions with candidates and right answers, or another tool's log."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=5000, help="Problems, at most.")] = 300,
    model: Model = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=10, help="Sampling temperature; default: the model's own; bundled: the suite's."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest solution; default: the model's context.")
    ] = None,
    thinking_tokens: Annotated[
        int | None, typer.Option(min=0, help="Longest thought of a solution; the answer is asked for after it.")
    ] = None,
    python: Annotated[bool, typer.Option("--python", help="Let the models run Python while they reason.")] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Problems solved at the same time; default: 8, with --matched seconds 1."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder for results.json, table.md, chart.png, and {RUNS_FILE}: a run can be resumed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure strategies on a suite: accuracy, tokens (verifier included), FLOPs, 95 % intervals, the ceiling pass@N.

    Strategies that decide on independent samples share one pool of them for each problem and seed and are resampled
    from it; the others run live. With --out, the same command continues a run that Ctrl-C ended. With --matched every
    strategy may spend the same on each problem.
    """
    settings = load_with(model=model)
    verifier = options.parse_verifier()
    more = options.list_more_models(settings, verifier)
    settings = settings.with_model_files(more)
    verifier = verifier or settings.default_verifier(settings.model_name)
    if (suite is None) == (candidates is None):
        raise typer.BadParameter("give a suite, or --candidates FILE", param_hint="SUITE")
    if concurrency is None:
        concurrency = 1 if matched.matched is Quantity.SECONDS else DEFAULT_CONCURRENCY
    if suite is None:
        assert candidates is not None
        return evaluate_candidates(
            candidates,
            settings,
            verifier=verifier,
            more=more,
            limit=limit,
            concurrency=concurrency,
            out=out,
            as_json=as_json,
        )
    plan = options.build(settings, verifier) if matched.matched is None else matched.build(options, settings, verifier)
    try:
        opened = open_suite(suite, limit=limit)
    except SuiteError as error:
        raise typer.BadParameter(str(error), param_hint="SUITE") from None
    if temperature is None and settings.is_bundled(plan.model):
        temperature = opened.temperature
    setting = EvalSetting(
        settings=settings,
        more=more,
        suite=opened,
        verifier=verifier,
        sampling=_make_sampling(temperature=temperature, max_tokens=max_tokens, thinking_tokens=thinking_tokens),
        tools=[PythonTool(type="python")] if python else [],
        concurrency=concurrency,
        out=out,
        as_json=as_json,
    )
    if isinstance(plan, MatchedPlan):
        evaluate_at_equal_budgets(setting, plan)
    else:
        _evaluate_by_n(setting, plan)


def _evaluate_by_n(setting: EvalSetting, plan: EvaluationPlan) -> None:
    conditions = setting.describe_conditions(plan.seeds)
    file = setting.run(
        plan,
        {**conditions, **setting.identify_suite(), **plan.document()},
        num_stages=len(plan.stages()),
        is_incomplete=lambda file: is_incomplete(setting.suite, plan, file),
        measure=evaluate,
    )
    failures = list_failures(Console(stderr=True), file)
    results = Results([run for run in collect_runs(file.items) if run.problem not in failures], plan)
    command = shlex.join(["reasoner", *sys.argv[1:]])
    document = {
        "suite": setting.suite.name,
        "problems": len(results.problems),
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


def _make_sampling(**given: float | None) -> Sampling:
    return Sampling.model_validate({name: value for name, value in given.items() if value is not None})


def _print(console: Console, results: Results) -> None:
    for headings, rows in (
        (report.ROW_HEADINGS, report.row_cells(results.rows())),
        (report.COMPARISON_HEADINGS, report.comparison_cells(results.comparisons())),
        (report.SAVING_HEADINGS, report.saving_cells(results.savings())),
    ):
        view = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            view.add_row(*row)
        console.print(view)
