"""``reasoner contest``: a list of problems under shared tokens and a shared time, resumed after any kill."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from api.cli.console import count_progress, exit_on_error, print_json, result_console
from api.cli.options import AsJson, Model, expand_options, load_with
from api.roles.private_service import run_private_engine
from api.studies.eval_options import PlanOptions
from engine.protocol.types import EngineError
from reasoner.admission.resolve import resolve_program_job
from reasoner.base_model import VerifierSpec
from reasoner.contest.contest import Contest, ContestSetting, OutcomeFile
from reasoner.contest.file_journal import DamagedJournal
from reasoner.contest.problems import ContestProblem, digest_problems, list_problems, read_problems
from reasoner.contest.report import build_report, check_answers, format_report, write_report
from reasoner.evaluation.origin import describe_origin
from reasoner.evaluation.plan import parse_cases
from reasoner.evaluation.runs import EvaluationMismatch
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import JobSpec
from reasoner.strategies.base import Feature
from reasoner.strategies.registry import STRATEGIES
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.processes import shutdown

MAX_PROBLEMS = 1000
LEAST_TOKENS = 32
"""Tokens that each problem must have at least, for want of a --max-tokens."""
CONFIDENCE = 0.95
"""Probability at which a search ends, if its strategy can and the command line says no other."""


@dataclass(frozen=True, slots=True)
class SolvingOptions:
    """The way in which each problem is solved."""

    strategy: Annotated[
        str | None,
        typer.Option(
            help="NAME or NAME:KEY=VALUE:KEY=VALUE; default: weighted_vote with a verifier, else self_consistency."
        ),
    ] = None
    n: Annotated[int, typer.Option("--n", min=1, max=4096, help="Solutions of a problem, at most.")] = 64
    verifier: Annotated[
        str | None,
        typer.Option(
            help="Verifier: its kind, or the field of a job as JSON; 'graded': the model grades its own solutions. "
            "Default: the model's own."
        ),
    ] = None
    python: Annotated[bool, typer.Option("--python", help="Let the model run Python while it reasons.")] = False
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest solution in tokens.")] = None
    thinking_tokens: Annotated[int | None, typer.Option(min=0, help="Longest thought of a solution.")] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, max=10, help="Sampling temperature; default: the model's own.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 0

    def parse_verifier(self, settings: Settings) -> VerifierSpec | None:
        """Return the verifier that is named, or else that of the model."""
        named = PlanOptions(verifier=self.verifier).parse_verifier()
        return named or settings.default_verifier(settings.model_name)

    def describe(self, settings: Settings, verifier: VerifierSpec | None) -> dict[str, Any]:
        """Return the fields of the job that all problems share. Raises ``typer.BadParameter``."""
        text = self.strategy or ("weighted_vote" if verifier is not None else "self_consistency")
        try:
            case, *others = parse_cases(text, has_verifier=verifier is not None)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--strategy") from None
        if others:
            raise typer.BadParameter("give one strategy", param_hint="--strategy")
        strategy = STRATEGIES[case.name]
        uses_verifier = strategy.verifier_use(strategy.parse(dict(case.params))).value != "none"
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        limits["thinking_tokens"] = self.thinking_tokens
        stops = Feature.EARLY_STOP in strategy.supports
        return {
            "model": settings.model_name,
            "strategy": case.to_spec(self.n),
            "verifier": verifier if uses_verifier else None,
            "sampling": Sampling.model_validate({name: value for name, value in limits.items() if value is not None}),
            "tools": [{"type": "python"}] if self.python else [],
            "confidence": (case.confidence or CONFIDENCE) if stops else None,
        }


@expand_options
def run_contest(
    options: SolvingOptions,
    file: Annotated[
        str,
        typer.Argument(
            help="Problems: a JSON Lines, CSV or Parquet file with 'id' and 'problem', perhaps 'answer'; or a suite of "
            "'reasoner eval'."
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all problems together, the verifier's included.")],
    hours: Annotated[float, typer.Option(min=0.001, max=1000, help="Working time for all of them.")] = 5.0,
    model: Model = None,
    modulo: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answers are whole numbers and handed in modulo this, 0 where there is none (AIMO 1 and 2: 1000, "
            "AIMO 3: 100000).",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_PROBLEMS, help="Problems, at most.")] = MAX_PROBLEMS,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: FILE's name with .contest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Solve a list of problems under shared tokens and a shared time, each with what its answer still gains.

    Answers are written as they come (answers.csv, answers.jsonl), the report at the end. The same command goes on after
    Ctrl-C, a crash or a kill.
    """
    settings = load_with(model=model)
    verifier = options.parse_verifier(settings)
    problems, suite = _open(file, limit)
    _check_tokens(tokens, len(problems), options.max_tokens)
    shared = options.describe(settings, verifier)
    folder = out or Path(f"{Path(file).stem}.contest")
    header = {
        "file": Path(file).name,
        "num_problems": len(problems),
        "content": digest_problems(problems),
        "tokens": tokens,
        "hours": hours,
        "modulo": modulo,
        "seed": options.seed,
        **JobRequest(problem="any", **shared).model_dump(mode="json", include=set(shared)),
    }

    def build_spec(problem: ContestProblem) -> JobSpec:
        noise = blake2b(f"{options.seed}/{problem.id}".encode(), digest_size=8)
        asked: dict[str, Any] = {"problem": problem.text}
        if suite is not None and problem.source is not None:
            asked = {"messages": problem.source.to_messages(), "answer": suite.answer_spec}
        request = JobRequest(seed=int.from_bytes(noise.digest()) >> 1, **asked, **shared)
        return resolve_program_job(request, settings.models)

    setting = ContestSetting(
        problems=tuple(problems),
        tokens=tokens,
        seconds=hours * 3600,
        build_spec=build_spec,
        folder=folder,
        modulo=modulo,
        calibration=settings.read_calibration(),
        prices=settings.prices,
    )
    console = Console(stderr=True)
    try:
        with exit_on_error(console, EngineError, DamagedJournal), OutcomeFile(header, folder) as outcomes:
            document = _run(setting, suite, settings, header=header, file=outcomes, console=console)
    except EvaluationMismatch as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    if as_json:
        print_json(document)
    else:
        result_console().print(format_report(document), markup=False, highlight=False, soft_wrap=True)


def _open(name: str, limit: int) -> tuple[list[ContestProblem], Suite | None]:
    """Return the problems of a file, or of a suite with it. Raises ``typer.BadParameter``."""
    try:
        if Path(name).is_file():
            return read_problems(Path(name))[:limit], None
        suite = open_suite(name, limit=min(limit, MAX_PROBLEMS))
        return list_problems(suite), suite
    except SuiteError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None


def _check_tokens(tokens: int, num_problems: int, max_tokens: int | None) -> None:
    """Raise ``typer.BadParameter`` for a budget that does not pay for a solution of each problem."""
    least = num_problems * (max_tokens or LEAST_TOKENS)
    if tokens < least:
        each = f"a solution of {max_tokens} tokens" if max_tokens else f"{LEAST_TOKENS} tokens"
        raise typer.BadParameter(
            f"{tokens} tokens do not pay for one solution of each of {num_problems} problems: give at least {least}, "
            f"{each} each",
            param_hint="--tokens",
        )


def _run(
    setting: ContestSetting,
    suite: Suite | None,
    settings: Settings,
    header: dict[str, Any],
    file: OutcomeFile,
    console: Console,
) -> dict[str, Any]:
    """Run what is left of a contest, and return its report, which is written too."""
    command = shlex.join(["reasoner", *sys.argv[1:]])
    with run_private_engine(settings, console) as urls, count_progress(console) as progress:
        task = progress.add_task("problems", total=len(setting.problems))
        told = -1

        def show(contest: Contest) -> None:
            nonlocal told
            ended = len(contest.outcomes)
            spent = f"{contest.tokens:,} of {setting.tokens:,} tokens, {contest.elapsed / 60:.1f} min"
            progress.update(task, completed=ended, description=spent)
            if not console.is_terminal and ended != told:
                print(f"{ended} of {len(setting.problems)} problems: {spent}", file=sys.stderr, flush=True)
            told = ended

        async def solve() -> dict[str, Any]:
            engine = connect(settings, urls)
            try:
                contest = Contest(setting, engine, file, show)
                await contest.run()
            finally:
                await engine.close()
            right = await check_answers(setting.problems, contest.outcomes, setting.modulo, suite)
            about = header | {"origin": describe_origin(command)}
            return build_report(about, setting.problems, contest.outcomes, right=right, seconds=contest.elapsed)

        document = shutdown.run(solve())
    write_report(setting.folder, document)
    return document
