"""``reasoner prm``: step labels by rollouts, training on them, and ProcessBench's measure of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from api.cli.known_answers import Known
from api.roles.compute_process import compute
from api.roles.private_service import run_private_engine
from engine.protocol.types import EngineClient, EngineError, InvalidRequest
from prm.evaluate import Case, Result, Scores, evaluate, fit_threshold, read_cases, score_cases
from prm.formats.registry import FORMATS
from prm.records import BadRecord
from prm.rollouts.rollouts import Plan, Tally, roll_out
from prm.scorers.steps import Chain, StepScorer
from workers.config.settings import Settings, load_settings
from workers.config.types import require_model_folder
from workers.engines.connect import connect
from workers.processes import shutdown

prm = typer.Typer(help="Make a process reward model, and measure one.", no_args_is_help=True)

_DEVICE = "cpu or cuda."
_SAVE_SECONDS = 60.0
"""For a training process to write its checkpoint after Ctrl-C."""


@prm.callback()
def group() -> None:
    """Make a process reward model, and measure one."""


@prm.command("rollouts")
def rollouts(
    problems: Annotated[
        str, typer.Argument(help='countdown or words (training problems), or JSONL with "question" and "answer".')
    ],
    out: Annotated[Path, typer.Argument(help="JSONL to write; one of the same settings is continued.")],
    model: Annotated[str | None, typer.Option(help="The policy: a bundled model, a folder, or NAME=FOLDER.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Problems; default: all of a file, 200 of a suite.")] = None,
    solutions: Annotated[int, typer.Option(min=1, max=1024, help="Of each problem.")] = 8,
    completions: Annotated[int, typer.Option(min=1, max=1024, help="Of each step.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.01, max=10, help="Of solutions and completions.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Longest solution.")] = 1024,
    early: Annotated[
        bool, typer.Option("--early", help="Hard labels alone, for fewer tokens: stop where a label is settled.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of problems and noise.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Solutions at a time.")] = 16,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Label the steps of sampled solutions: how often is the answer right when one goes on from here?

    Every answer of the engine is a line of OUT at once: the same command goes on where a stopped one was.
    """
    console = Console(stderr=True)
    settings = _settings(model=model, engine_device=device)
    plan = Plan(
        model=settings.model_name,
        solutions=solutions,
        completions=completions,
        temperature=temperature,
        max_tokens=max_tokens,
        early=early,
        seed=seed,
        concurrency=concurrency,
    )
    with _bad_records_are_wrong_usage("PROBLEMS"):
        known = Known.open(problems, limit, seed)
    with _engine(settings, console) as engine, _bad_records_are_wrong_usage("OUT"):
        tally = shutdown.run(_roll_out(known, plan, engine, out, console))
    document = asdict(tally) | {"out": str(out)}
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print_tally(tally, out)


@prm.command("train")
def train(
    data: Annotated[Path, typer.Argument(help="What `reasoner prm rollouts` wrote.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder of the PRM, which must not be there yet.")],
    base: Annotated[
        str, typer.Option(help="What to start from: a causal model's folder, or a bundled model's name.")
    ] = "policy",
    labels: Annotated[Literal["soft", "hard"], typer.Option(help="soft: the share right; hard: any right.")] = "soft",
    separator: Annotated[str, typer.Option(help="Behind each step; \\n is a line's end.")] = "\\n\\n",
    epochs: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Solutions in a step of the optimiser.")] = 32,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens forwarded at a time.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer solutions lose their last steps.")] = 4096,
    rate: Annotated[float, typer.Option(min=1e-9, max=1, help="Highest learning rate.")] = 1e-5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help=_DEVICE)] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Train a PRM on labelled steps; the same command goes on where a stopped one was (OUT.work has its checkpoint)."""
    asked = {
        "base": str(require_model_folder(base, "base")),
        "data": str(data),
        "out": str(out),
        "labels": labels,
        "separator": separator.replace("\\n", "\n"),
        "epochs": epochs,
        "batch": batch,
        "batch_tokens": batch_tokens,
        "max_tokens": max_tokens,
        "rate": rate,
        "seed": seed,
        "device": device,
    }
    document = compute("prm", asked, Console(stderr=True), grace=_SAVE_SECONDS)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    seen = document["validation"]
    view = Table("PRM", "examples", "held out", "loss", "AUC", "AUC within questions", "seconds")
    told = [f"{seen['loss']:.4f}", _share(seen["auc"]), _share(seen["within"]), f"{document['seconds']:.0f}"]
    view.add_row(document["out"], str(document["examples"]), str(document["held_out"]), *told)
    Console().print(view)


@prm.command("evaluate")
def evaluate_file(
    file: Annotated[Path, typer.Argument(help="Cases in ProcessBench's format: JSONL or a JSON array.")],
    model: Annotated[
        str | None, typer.Option("--prm", help="The PRM: a bundled model, a folder, or NAME=FOLDER.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="Which public PRM it is, where its config.json does not show it."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="A step that scores below it is wrong; default 0.5.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Cases on which the best threshold is found instead.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many cases of FILE.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Cases at a time.")] = 16,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """How well a PRM finds the first wrong step: accuracy with and without an error, and F1 (ProcessBench)."""
    console = Console(stderr=True)
    if threshold is not None and fit is not None:
        raise typer.BadParameter("give a threshold or cases to fit it on, not both", param_hint="--threshold")
    if form is not None and form not in FORMATS:
        raise typer.BadParameter(f"{form!r} is not known; known are {', '.join(FORMATS)}", param_hint="--format")
    with _bad_records_are_wrong_usage("FILE"):
        cases = read_cases(file)[:limit]
    fitted: list[Case] = []
    if fit is not None:
        with _bad_records_are_wrong_usage("--fit"):
            fitted = read_cases(fit)
    settings = _settings(prm=model, prm_format=form, engine_device=device)
    name = settings.require_prm("reasoner prm evaluate")
    with _engine(settings, console) as engine:
        scores = shutdown.run(_score([*fitted, *cases], engine, name, concurrency, console))
    if fitted:
        try:
            threshold = fit_threshold(fitted, scores[: len(fitted)])
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--fit") from None
    result = evaluate(cases, scores[len(fitted) :], 0.5 if threshold is None else threshold)
    fitted_on = None if fit is None else str(fit)
    if as_json:
        document = {"file": str(file), "prm": settings.verifier, "fitted_on": fitted_on}
        print(json.dumps(document | asdict(result), indent=2))
    else:
        _print_result(result, fitted_on)


async def _roll_out(known: Known, plan: Plan, engine: EngineClient, out: Path, console: Console) -> Tally:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("solutions", total=known.count * plan.solutions)

            def show(tally: Tally) -> None:
                text = f"solutions ({tally.good} of {tally.steps} steps good, {tally.generated} tokens)"
                progress.update(task, completed=tally.solutions, description=text)

            async with known:
                return await roll_out(known.problems(), plan, engine, known.judge, out, show)
    finally:
        await engine.close()


async def _score(
    cases: list[Case], engine: EngineClient, name: str, concurrency: int, console: Console
) -> list[Scores]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        scorer = await _scorer(engine, name)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("cases", total=len(cases))

            async def score(case: Case, steps: tuple[str, ...]) -> tuple[float, ...]:
                prompt = await scorer.prompt([{"role": "user", "content": case.problem}])
                try:
                    [scored] = await scorer.score(prompt, [Chain(steps)])
                except InvalidRequest as error:
                    raise InvalidRequest(f"case {case.id}: {error}", error.field) from None
                assert scored.scores is not None  # no bound was given
                return scored.scores

            return await score_cases(
                cases, score, concurrency=concurrency, on_progress=lambda: progress.update(task, advance=1)
            )
    finally:
        await engine.close()


async def _scorer(engine: EngineClient, name: str) -> StepScorer:
    for info in await engine.models():
        if info.id == name:
            return StepScorer(engine, info)
    raise EngineError(f"the engine does not serve {name!r}")


def _settings(**overrides: Any) -> Settings:
    return load_settings(**{name: value for name, value in overrides.items() if value is not None})


@contextmanager
def _engine(settings: Settings, console: Console) -> Iterator[EngineClient]:
    """The configured engine or one of our own. What it refuses ends the command; Ctrl-C does in order."""
    try:
        with run_private_engine(settings, console) as urls:
            yield connect(settings, urls)
    except EngineError as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("reasoner: stopped; what is written stays, and the same command goes on from there")
        raise


@contextmanager
def _bad_records_are_wrong_usage(what: str) -> Iterator[None]:
    try:
        yield
    except BadRecord as error:
        raise typer.BadParameter(str(error), param_hint=what) from None


def _print_tally(tally: Tally, out: Path) -> None:
    view = Table("file", "solutions", "steps", "of them good", "tokens generated", "prompt tokens cached")
    cached = f"{tally.cached / tally.prompt:.0%}" if tally.prompt else ""
    view.add_row(str(out), str(tally.solutions), str(tally.steps), str(tally.good), str(tally.generated), cached)
    Console().print(view)


def _print_result(result: Result, fitted_on: str | None) -> None:
    view = Table("cases", "with an error", "threshold", "accuracy: error", "accuracy: correct", "F1")
    where = f"{result.threshold:.4f}" + ("" if fitted_on is None else f" (from {fitted_on})")
    shares = [_share(result.error_accuracy), _share(result.correct_accuracy), _share(result.f1)]
    view.add_row(str(result.cases), str(result.erroneous), where, *shares)
    Console().print(view)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
