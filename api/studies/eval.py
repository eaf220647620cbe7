"""``reasoner eval``: accuracy against compute of several strategies on a suite, as a table, JSON and a chart."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from api.cli.console import count_progress, print_json, result_console
from api.cli.job_options import parse_word_or_json
from api.cli.options import AsJson, Model, expand_options, load_with
from api.roles.private_service import run_private_engine
from api.studies.select import evaluate_candidates
from engine.protocol.types import EngineError
from reasoner.admission.resolve import resolve_program_job
from reasoner.base_model import VerifierSpec
from reasoner.evaluation import report
from reasoner.evaluation.comparisons import Results
from reasoner.evaluation.measure import Advance, EvaluationContext, evaluate, is_incomplete
from reasoner.evaluation.plan import EvaluationPlan, Stage, parse_cases, parse_counts, split_pooled_and_live
from reasoner.evaluation.pool import NUM_DRAWS
from reasoner.evaluation.runs import RUNS_FILE, EvaluationMismatch, RunFile, collect_runs
from reasoner.evaluation.suites.registry import BUNDLED, open_suite
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.tool_specs import PythonTool
from reasoner.jobs.verifier_specs import PrmVerifier, Verifier
from workers.config.settings import Settings
from workers.config.types import served_name
from workers.engines.connect import connect
from workers.processes import shutdown

_VERIFIERS: TypeAdapter[VerifierSpec] = TypeAdapter(Verifier)
NUM_PROGRESS_LINES = 20
"""Lines of progress for each stage if stderr is no terminal."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The strategies, models and verifier to measure, and the numbers of samples and runs."""

    strategy: Annotated[
        str, typer.Option(help="all, or a list separated by commas of NAME or NAME:KEY=VALUE:KEY=VALUE.")
    ] = "all"
    n: Annotated[str, typer.Option("--n", help="Numbers of samples, separated by commas.")] = "1,4,16,64"
    live_n: Annotated[
        str | None,
        typer.Option("--live-n", help="Numbers of samples of strategies that cannot share a pool; default: --n."),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of every problem, each with another seed.")] = 1
    against: Annotated[
        list[str] | None, typer.Option(help="A larger model, run greedily and compared at equal FLOPs. Repeatable.")
    ] = None
    mixed: Annotated[
        list[str] | None, typer.Option("--with", help="A further model to sample from, in the same search. Repeatable.")
    ] = None
    verifier: Annotated[
        str | None,
        typer.Option(help="Verifier: its kind, or the field of a job as JSON; default: the model's own."),
    ] = None

    def build(self, settings: Settings, verifier: VerifierSpec | None) -> EvaluationPlan:
        """Return the plan. Raises ``typer.BadParameter``."""
        has_verifier = verifier is not None and verifier.can_score()
        counts = _parse_counts("--n", self.n)
        live_counts = counts if self.live_n is None else _parse_counts("--live-n", self.live_n)
        try:
            cases = parse_cases(self.strategy, has_verifier=has_verifier)
            pooled, live = split_pooled_and_live(cases, has_several_models=bool(self.mixed))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--strategy") from None
        against, mixed = (tuple(served_name(value) for value in given or ()) for given in (self.against, self.mixed))
        return EvaluationPlan(
            settings.model_name,
            pooled,
            live=live,
            ns=counts,
            live_ns=live_counts,
            seeds=self.seeds,
            against=against,
            mixed=mixed,
        )

    def list_more_models(self, settings: Settings, verifier: VerifierSpec | None) -> dict[str, str]:
        """Return the models to serve besides the policy, each with the option that names it."""
        more = dict.fromkeys(self.against or (), "--against") | dict.fromkeys(self.mixed or (), "--with")
        scorer = getattr(verifier, "model", None)
        if scorer is not None and scorer not in settings.local_models():
            more.setdefault(scorer, "--verifier")
        return more

    def parse_verifier(self) -> VerifierSpec | None:
        """Return the verifier, ``None`` for the model's own. Raises ``typer.BadParameter``."""
        given = parse_word_or_json("verifier", self.verifier)
        if given is None:
            return None
        try:
            verifier = _VERIFIERS.validate_python({"kind": given} if isinstance(given, str) else given)
        except ValidationError as error:
            places = [(".".join(map(str, fault["loc"][1:])), fault["msg"]) for fault in error.errors()]
            faults = "; ".join(f"{place}: {message}" if place else message for place, message in places)
            raise typer.BadParameter(faults, param_hint="--verifier") from None
        return None if verifier == PrmVerifier() else verifier


def _parse_counts(option: str, text: str) -> tuple[int, ...]:
    try:
        return parse_counts(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


@expand_options
def evaluate_suite(
    options: PlanOptions,
    suite: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(BUNDLED)}, a file of problems or reasoning-gym:TASK."),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(help="Instead of a suite: a file of questions with candidates and right answers, to choose from."),
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
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems solved at the same time.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder for results.json, table.md, chart.png, and {RUNS_FILE}: a run can be resumed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure strategies on a suite: accuracy, tokens (verifier included), FLOPs, 95 % intervals, the ceiling pass@N.

    Strategies that decide on independent samples share one pool of them for each problem and seed and are resampled
    from it; the others run live. With --out, the same command continues a run that Ctrl-C ended.
    """
    console = Console(stderr=True)
    settings = load_with(model=model)
    verifier = options.parse_verifier()
    more = options.list_more_models(settings, verifier)
    settings = settings.with_model_files(more)
    verifier = verifier or settings.default_verifier(settings.model_name)
    if (suite is None) == (candidates is None):
        raise typer.BadParameter("give a suite, or --candidates FILE", param_hint="SUITE")
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
    plan = options.build(settings, verifier)
    try:
        opened = open_suite(suite, limit=limit)
    except SuiteError as error:
        raise typer.BadParameter(str(error), param_hint="SUITE") from None
    if temperature is None and settings.is_bundled(plan.model):
        temperature = opened.temperature
    sampling = _make_sampling(temperature=temperature, max_tokens=max_tokens, thinking_tokens=thinking_tokens)
    tools = [PythonTool(type="python")] if python else []
    conditions = _describe_conditions(settings, plan, sampling=sampling, tools=tools, suite=opened, verifier=verifier)
    try:
        with RunFile({**conditions, **_identify_suite(opened), **plan.document()}, out) as file:
            if is_incomplete(opened, plan, file):
                with (
                    _explain_interruption(console, out),
                    run_private_engine(settings, console, more) as urls,
                    _show_progress(console, opened, plan) as advance,
                ):
                    work = _run_evaluation(
                        settings,
                        urls,
                        suite=opened,
                        plan=plan,
                        verifier=verifier,
                        sampling=sampling,
                        tools=tools,
                        concurrency=concurrency,
                        file=file,
                        advance=advance,
                    )
                    shutdown.run(work)
    except EvaluationMismatch as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    _report(console, file, opened, plan, conditions=conditions, out=out, as_json=as_json)


def _report(
    console: Console,
    file: RunFile,
    suite: Suite,
    plan: EvaluationPlan,
    *,
    conditions: Mapping[str, Any],
    out: Path | None,
    as_json: bool,
) -> None:
    """Write and print what the runs of ``file`` show. Raises ``typer.Exit`` if no problem was solved."""
    failures = {piece.problem: piece.failed for piece in file.items if piece.failed is not None}
    for problem, reason in failures.items():
        console.print(f"left out: {problem}: {reason}", markup=False)
    runs = [run for run in collect_runs(file.items) if run.problem not in failures]
    if not runs:
        raise typer.Exit(1)
    results = Results(runs, plan)
    document = {
        "suite": suite.name,
        "problems": len(results.problems),
        **results.document(),
        "left_out": [{"problem": problem, "error": reason} for problem, reason in failures.items()],
        "settings": conditions,
    }
    if out is not None:
        report.write(out, results, document, shlex.join(["reasoner", *sys.argv[1:]]))
    if as_json:
        print_json(document)
    else:
        _print(result_console(), results)


def _make_sampling(**given: float | None) -> Sampling:
    return Sampling.model_validate({name: value for name, value in given.items() if value is not None})


def _describe_conditions(
    settings: Settings,
    plan: EvaluationPlan,
    sampling: Sampling,
    tools: list[PythonTool],
    suite: Suite,
    verifier: VerifierSpec | None,
) -> dict[str, Any]:
    """Return the settings on which the results depend; a run is resumed only under the same ones."""
    question = JobRequest(problem="any", model=plan.model, answer=suite.answer_spec, sampling=sampling)
    asked = resolve_program_job(question, settings.models)
    other: dict[str, Any] = {"tools": [tool.model_dump() for tool in tools]} if tools else {}
    if verifier is not None and (settings.prm_name is None or verifier != PrmVerifier(model=settings.prm_name)):
        other["verifier"] = verifier.model_dump_json()
    return {
        "model": plan.model,
        "system": asked.system,
        "prompt": asked.prompt,
        "prm": settings.prm_name,
        **other,
        "seeds": plan.seeds,
        "temperature": asked.sampling.temperature,
        "max_tokens": asked.sampling.max_tokens,
        "thinking_tokens": asked.sampling.thinking_tokens,
        "draws": NUM_DRAWS,
        "calibration": None if settings.calibration is None else str(settings.calibration),
    }


@contextlib.contextmanager
def _explain_interruption(console: Console, out: Path | None) -> Iterator[None]:
    """Say what remains of an evaluation that Ctrl-C or an error of the engine ends."""
    if out is None:
        remains = "Stopped; without --out no results are kept."
    else:
        remains = f"Stopped; the results so far are in {out / RUNS_FILE}, and the same command continues from there."
    try:
        yield
    except KeyboardInterrupt:
        console.print(remains, markup=False, soft_wrap=True)
        raise
    except EngineError as error:
        console.print(f"reasoner: {error}. {remains}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _identify_suite(suite: Suite) -> dict[str, Any]:
    """Return what distinguishes a suite from others: its name, its size and a digest of its content."""
    content = blake2b(digest_size=8)
    for problem in suite.problems:
        content.update(repr((problem.id, problem.text, problem.answer, *problem.examples)).encode())
    return {"suite": suite.name, "problems": len(suite.problems), "content": content.hexdigest()}


async def _run_evaluation(
    settings: Settings,
    urls: tuple[str, ...],
    suite: Suite,
    plan: EvaluationPlan,
    verifier: VerifierSpec | None,
    sampling: Sampling,
    tools: list[PythonTool],
    concurrency: int,
    file: RunFile,
    advance: Advance,
) -> None:
    engine = connect(settings, urls)
    try:
        setting = await EvaluationContext.of(
            suite,
            plan,
            engine,
            verifier,
            sampling,
            concurrency,
            settings.read_calibration(),
            settings.models,
            tools,
        )
        await evaluate(setting, file, advance)
    finally:
        await engine.close()


@contextlib.contextmanager
def _show_progress(console: Console, suite: Suite, plan: EvaluationPlan) -> Iterator[Advance]:
    """Show progress as a bar on a terminal, and elsewhere as a line now and then."""
    stages = plan.stages()
    names = {
        stage: f"{suite.name} {number}/{len(stages)} {_write_title(stage, plan)}"
        for number, stage in enumerate(stages, 1)
    }
    if not console.is_terminal:

        def print_line(stage: Stage, done: int, total: int) -> None:
            if done == total or done % max(1, total // NUM_PROGRESS_LINES) == 0:
                print(f"{names[stage]}: {done} of {total}", file=sys.stderr, flush=True)

        yield print_line
        return
    with count_progress(console, shows_remaining=True) as bar:
        task = bar.add_task("starting", total=None)
        current: Stage | None = None

        def show(stage: Stage, done: int, total: int) -> None:
            nonlocal current
            if stage != current:
                bar.reset(task, total=total, description=names[stage])
                current = stage
            bar.update(task, completed=done)

        yield show


def _write_title(stage: Stage, plan: EvaluationPlan) -> str:
    return stage.name + (f", seed {stage.seed + 1} of {plan.seeds}" if plan.seeds > 1 else "")


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
