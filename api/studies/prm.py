"""``reasoner prm``: label steps by rollouts, train a process reward model on them, and evaluate it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from api.cli.console import count_progress, describe_auc, exit_on_error, print_json
from api.cli.options import AsJson, load_with
from api.roles.compute_process import compute
from api.roles.private_service import run_private_engine
from api.studies.known_answers import LabelledProblems
from engine.protocol.types import EngineClient, EngineError, InvalidRequest, ModelInfo, list_answering
from prm.evaluate import ProcessBenchCase, Result, Score, Scores, evaluate, fit_threshold, read_cases, score_cases
from prm.formats.registry import FORMATS
from prm.records import BadRecord
from prm.rollouts.rollouts import RolloutPlan, RolloutStats, roll_out
from prm.scorers.steps import StepChain, StepScorer
from prm.scorers.written_steps import WrittenStepScorer
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.request import JobRequest
from workers.config.settings import Settings
from workers.config.types import require_model_folder, served_name
from workers.engines.connect import connect
from workers.processes import shutdown

prm = typer.Typer(help="Make a process reward model, and measure one.", no_args_is_help=True)

_DEVICE = "cpu or cuda."
_MAX_CRITIQUE_TOKENS = 2048
_SAVE_SECONDS = 60.0
"""Seconds for a training process to write its checkpoint after Ctrl-C."""


@prm.command("rollouts")
def rollouts(
    problems: Annotated[
        str,
        typer.Argument(
            help="Training problems of countdown, words, arithmetic or reasoning-gym:TASK, or JSONL with "
            '"question" and "answer".'
        ),
    ],
    out: Annotated[Path, typer.Argument(help="JSONL file to write; one with the same settings is continued.")],
    model: Annotated[str | None, typer.Option(help="The policy: a bundled model, a folder, or NAME=FOLDER.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Problems; default: all of a file, 200 of a suite.")] = None,
    solutions: Annotated[int, typer.Option(min=1, max=1024, help="Solutions of each problem.")] = 8,
    completions: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="Completions of each step; 0: the solution's own outcome labels all of its steps."
        ),
    ] = 8,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, max=10, help="Sampling temperature; default: the model's own, else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Longest solution; default: the model's, else 1024.")
    ] = None,
    early: Annotated[
        bool, typer.Option("--early", help="Hard labels only, for fewer tokens: stop as soon as a label is certain.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and the sampling noise.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Solutions generated at the same time.")] = 16,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    as_json: AsJson = False,
) -> None:
    """Label each step of sampled solutions by how often completions from it reach the right answer.

    Every answer of the engine becomes a line of OUT at once: the same command continues an interrupted run.
    """
    console = Console(stderr=True)
    settings = load_with(model=model, engine_device=device)
    with _report_bad_records("PROBLEMS"):
        labelled = LabelledProblems.open(problems, limit, seed)
    question = JobRequest(problem="any", model=settings.model_name, answer=labelled.answer_spec)
    asked = resolve_program_job(question, settings.models)
    sampling = {name: value for name, value in asked.sampling.of_engine.items() if name != "kv_budget"}
    plan = RolloutPlan(
        model=settings.model_name,
        system=asked.system,
        prompt=asked.prompt,
        solutions=solutions,
        completions=completions,
        sampling=sampling if temperature is None else sampling | {"temperature": temperature},
        stop=tuple(asked.stop),
        chat_template_kwargs=asked.chat_template_kwargs,
        max_tokens=max_tokens or asked.sampling.max_tokens or 1024,
        early=early,
        seed=seed,
        concurrency=concurrency,
    )
    with _open_engine(settings, console) as engine, _report_bad_records("OUT"):
        stats = shutdown.run(_roll_out(labelled, plan, engine=engine, out=out, console=console))
    document = asdict(stats) | {"out": str(out)}
    if as_json:
        print_json(document)
    else:
        _print_stats(stats, out)


@prm.command("train")
def train(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="File that `reasoner prm rollouts` wrote.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder of the PRM, adapter or probe; it must not exist yet.")],
    base: Annotated[
        str,
        typer.Option(
            help="Base of the PRM, or the policy of the probe or adapter: a folder, a bundled model, or a GGUF file."
        ),
    ] = "policy",
    probe: Annotated[
        bool, typer.Option("--probe", help="Fit a head on the hidden states of the policy that made DATA instead.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train a LoRA adapter of the policy that made DATA to judge it instead.")
    ] = False,
    alora: Annotated[
        bool, typer.Option("--alora", help="The same, activated behind the branch alone: it reads the policy's keys.")
    ] = False,
    hidden: Annotated[int, typer.Option(min=0, max=4096, help="Units of a probe's hidden layer; 0: linear.")] = 0,
    rank: Annotated[int, typer.Option(min=1, max=256, help="Rank of an adapter.")] = 16,
    invocation: Annotated[
        str, typer.Option(help="Text behind a branch that asks an adapter for Yes or No; \\n is a line break.")
    ] = "\\n\\n?",
    labels: Annotated[
        Literal["soft", "hard", "outcome"],
        typer.Option(help="soft: share of right completions; hard: 1 if any is right; outcome: of the solution."),
    ] = "soft",
    separator: Annotated[str, typer.Option(help="Text after each step; \\n is a line break.")] = "\\n\\n",
    epochs: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Solutions in an optimizer step.")] = 32,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens of a forward pass.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer solutions lose their last steps.")] = 4096,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1, help="Highest learning rate; default 1e-5, of an adapter 3e-4."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help=_DEVICE)] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Train a PRM on labelled steps. The same command continues an interrupted run from its checkpoint in OUT.work.

    With --alora or --lora, train an adapter of the policy to judge its own branches; with --probe, fit a head on the
    policy's own hidden states, in minutes on a CPU.
    """
    kind = _find_kind(probe=probe, lora=lora, alora=alora)
    _check_train_options(context, kind, labels)
    request: dict[str, Any] = {
        "base": str(require_model_folder(base, "base")),
        "data": str(data),
        "out": str(out),
        "labels": labels,
        "seed": seed,
    }
    values = {
        "hidden": hidden,
        "rank": rank,
        "invocation": invocation.replace("\\n", "\n"),
        "separator": separator.replace("\\n", "\n"),
        "epochs": epochs,
        "batch": batch,
        "batch_tokens": batch_tokens,
        "max_tokens": max_tokens,
        "rate": rate,
        "device": device,
    }
    request |= {name: values[name] for name in _TRAIN_OPTIONS[kind] if values[name] is not None}
    if kind != "prm":
        request |= {"probe": True} if probe else {"adapter": True, "is_activated": alora}
    grace = {} if probe else {"grace": _SAVE_SECONDS}
    document = compute("prm", request, Console(stderr=True), **grace)
    if as_json:
        print_json(document)
    else:
        _print_probe(document) if probe else _print_trained(document, "PRM" if kind == "prm" else "adapter")


_LOOP_OPTIONS = "epochs", "batch", "batch_tokens", "max_tokens", "rate", "device"
_TRAIN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "prm": ("separator", *_LOOP_OPTIONS),
    "adapter": ("rank", "invocation", *_LOOP_OPTIONS),
    "probe": ("hidden",),
}
"""Options of each kind of training, by their names in its plan."""


def _find_kind(*, probe: bool, lora: bool, alora: bool) -> str:
    """Return the key of ``_TRAIN_OPTIONS`` for these flags, of which one may be given."""
    if probe + lora + alora > 1:
        raise typer.BadParameter("give one of --probe, --lora and --alora")
    return "probe" if probe else "adapter" if lora or alora else "prm"


def _check_train_options(context: typer.Context, kind: str, labels: str) -> None:
    """Refuse options of the command line that would be ignored."""
    for name in dict.fromkeys(name for names in _TRAIN_OPTIONS.values() for name in names):
        source = context.get_parameter_source(name)
        if name not in _TRAIN_OPTIONS[kind] and source is not None and source.name == "COMMANDLINE":
            owners = " or ".join(other for other, names in _TRAIN_OPTIONS.items() if name in names)
            raise typer.BadParameter(
                f"this option is for training of: {owners}; leave it out here", param_hint=f"--{name.replace('_', '-')}"
            )
    if labels == "outcome" and kind == "prm":
        raise typer.BadParameter(
            "a PRM is trained on soft or hard labels; outcomes are for probes and adapters", param_hint="--labels"
        )


@prm.command("evaluate")
def evaluate_file(
    file: Annotated[Path, typer.Argument(help="Cases in ProcessBench's format: JSONL or a JSON array.")],
    model: Annotated[
        str | None, typer.Option("--prm", help="The PRM: a bundled model, a folder, or NAME=FOLDER.")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Format of a public PRM, if its config.json does not show it.")
    ] = None,
    generative: Annotated[
        str | None, typer.Option(help="Instead of a PRM: a language model that writes a critique before its verdict.")
    ] = None,
    votes: Annotated[int, typer.Option(min=1, max=64, help="Critiques of each step, whose verdicts are averaged.")] = 1,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Steps that score below it count as wrong; default 0.5.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="File of cases to fit the best threshold on instead.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first cases of FILE.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Cases scored at the same time.")] = 16,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a PRM finds the first wrong step: accuracy with and without an error, and F1 (ProcessBench)."""
    console = Console(stderr=True)
    if threshold is not None and fit is not None:
        raise typer.BadParameter("give a threshold or cases to fit it on, not both", param_hint="--threshold")
    if form is not None and form not in FORMATS:
        raise typer.BadParameter(f"there is no format {form!r}; known are {', '.join(FORMATS)}", param_hint="--format")
    with _report_bad_records("FILE"):
        cases = read_cases(file)[:limit]
    fitted: list[ProcessBenchCase] = []
    if fit is not None:
        with _report_bad_records("--fit"):
            fitted = read_cases(fit)
    settings = load_with(prm=model, prm_format=form, engine_device=device)
    name = settings.require_prm("reasoner prm evaluate") if generative is None else served_name(generative)
    more = {} if generative is None else {generative: "--generative"}
    with _open_engine(settings, console, more) as engine:
        written = None if generative is None else votes
        scores = shutdown.run(
            _score([*fitted, *cases], engine, name=name, votes=written, concurrency=concurrency, console=console)
        )
    if fitted:
        try:
            threshold = fit_threshold(fitted, scores[: len(fitted)])
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--fit") from None
    result = evaluate(cases, scores[len(fitted) :], 0.5 if threshold is None else threshold)
    fitted_on = None if fit is None else str(fit)
    if as_json:
        document = {"file": str(file), "prm": generative or settings.verifier, "fitted_on": fitted_on}
        print_json(document | asdict(result))
    else:
        _print_result(result, fitted_on)


async def _roll_out(
    problems: LabelledProblems, plan: RolloutPlan, engine: EngineClient, out: Path, console: Console
) -> RolloutStats:
    try:
        with count_progress(console, shows_remaining=True) as progress:
            task = progress.add_task("solutions", total=problems.count * plan.solutions)

            def show(stats: RolloutStats) -> None:
                text = f"solutions ({stats.good} of {stats.steps} steps good, {stats.generated} tokens)"
                progress.update(task, completed=stats.solutions, description=text)

            async with problems:
                return await roll_out(
                    problems.problems(), plan, engine=engine, judge=problems.judge, path=out, on_progress=show
                )
    finally:
        await engine.close()


async def _score(
    cases: list[ProcessBenchCase],
    engine: EngineClient,
    name: str,
    votes: int | None,
    concurrency: int,
    console: Console,
) -> list[Scores]:
    """Score the cases' steps by a PRM, or with ``votes`` by a model that writes critiques."""
    try:
        info = await _find_model(engine, name)
        score_case = _score_by_prm(engine, info) if votes is None else await _score_by_critiques(engine, info, votes)
        with count_progress(console) as progress:
            task = progress.add_task("cases", total=len(cases))

            async def score(case: ProcessBenchCase, steps: tuple[str, ...]) -> Sequence[float | None]:
                try:
                    return await score_case(case, steps)
                except InvalidRequest as error:
                    raise InvalidRequest(f"case {case.id}: {error}", error.field) from None

            return await score_cases(
                cases, score, concurrency=concurrency, on_progress=lambda: progress.update(task, advance=1)
            )
    finally:
        await engine.close()


def _score_by_prm(engine: EngineClient, info: ModelInfo) -> Score:
    scorer = StepScorer(engine, info)

    async def score(case: ProcessBenchCase, steps: tuple[str, ...]) -> Sequence[float | None]:
        prompt = await scorer.encode_question([{"role": "user", "content": case.problem}])
        [scored] = await scorer.score(prompt, [StepChain(steps)])
        assert scored.scores is not None  # no bound was given
        return scored.scores

    return score


async def _score_by_critiques(engine: EngineClient, info: ModelInfo, votes: int) -> Score:
    scorer = await WrittenStepScorer.open(engine, info, votes, _MAX_CRITIQUE_TOKENS)

    async def score(case: ProcessBenchCase, steps: tuple[str, ...]) -> Sequence[float | None]:
        return await scorer.score(case.problem, steps)

    return score


async def _find_model(engine: EngineClient, name: str) -> ModelInfo:
    for info in await list_answering(engine):
        if info.id == name:
            return info
    raise EngineError(f"the engine does not serve {name!r}")


@contextmanager
def _open_engine(
    settings: Settings, console: Console, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[EngineClient]:
    """Yield the configured engine, or a private one. Its errors and Ctrl-C end the command with a message."""
    try:
        with exit_on_error(console, EngineError), run_private_engine(settings, console, more) as urls:
            yield connect(settings, urls)
    except KeyboardInterrupt:
        console.print("reasoner: stopped; the same command continues from what is written")
        raise


@contextmanager
def _report_bad_records(argument: str) -> Iterator[None]:
    try:
        yield
    except BadRecord as error:
        raise typer.BadParameter(str(error), param_hint=argument) from None


def _print_trained(document: Any, kind: str) -> None:
    """Print the result of the training of a PRM or an adapter."""
    validation = document["validation"]
    view = Table(kind, "examples", "held out", "loss", "AUC", "AUC within questions", "seconds")
    metrics = [
        f"{validation['loss']:.4f}",
        _format_share(validation["auc"]),
        _format_share(validation["within"]),
        f"{document['seconds']:.0f}",
    ]
    view.add_row(document["out"], str(document["examples"]), str(document["held_out"]), *metrics)
    Console().print(view)
    _comment_on_auc(validation)


def _print_probe(document: Any) -> None:
    """Print the AUC of each layer, and the result of a probe on test questions."""
    layers = Table("layer", "AUC, validation", "AUC, test", "")
    for row in document["by_layer"]:
        is_read = "read" if row["layer"] in document["layers"] else ""
        layers.add_row(str(row["layer"]), _format_share(row["validation"]), _format_share(row["test"]), is_read)
    test = document["test"]
    view = Table("probe", "solutions", "steps", "questions", "loss", "AUC", "AUC within questions", "seconds")
    counts = [str(document[name]) for name in ("solutions", "steps", "questions")]
    metrics = [f"{test['loss']:.4f}", _format_share(test["auc"]), _format_share(test["within"])]
    view.add_row(document["out"], *counts, *metrics, f"{document['seconds']:.0f}")
    for table in (layers, view):
        Console().print(table)
    _comment_on_auc(test)


def _comment_on_auc(validation: dict[str, Any]) -> None:
    """Say so where the scores tell good steps from bad ones no better than chance would."""
    comment = describe_auc(validation["auc"], validation["within"])
    if comment is not None:
        Console().print(comment, markup=False, highlight=False, soft_wrap=True)


def _print_stats(stats: RolloutStats, out: Path) -> None:
    view = Table("file", "solutions", "steps", "of them good", "tokens generated", "prompt tokens cached")
    cached = f"{stats.cached / stats.prompt:.0%}" if stats.prompt else ""
    view.add_row(str(out), str(stats.solutions), str(stats.steps), str(stats.good), str(stats.generated), cached)
    Console().print(view)


def _print_result(result: Result, fitted_on: str | None) -> None:
    view = Table("cases", "with an error", "threshold", "accuracy: error", "accuracy: correct", "F1")
    where = f"{result.threshold:.4f}" + ("" if fitted_on is None else f" (from {fitted_on})")
    shares = [_format_share(result.error_accuracy), _format_share(result.correct_accuracy), _format_share(result.f1)]
    view.add_row(str(result.cases), str(result.erroneous), where, *shares)
    Console().print(view)


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
