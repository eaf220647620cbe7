"""The conditions of a run of ``reasoner eval``, its engine, and its progress: what all kinds of it share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from api.cli.console import count_progress
from api.roles.private_service import run_private_engine
from engine.protocol.types import EngineError
from reasoner.admission.resolve import resolve_program_job
from reasoner.base_model import VerifierSpec
from reasoner.evaluation.measure import Advance, EvaluationContext
from reasoner.evaluation.plan import EvaluationPlan, Stage
from reasoner.evaluation.pool import NUM_DRAWS
from reasoner.evaluation.runs import RUNS_FILE, EvaluationMismatch, RunFile
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.tool_specs import PythonTool
from reasoner.jobs.verifier_specs import PrmVerifier
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.processes import shutdown

NUM_PROGRESS_LINES = 20
"""Lines of progress for each stage if stderr is no terminal."""


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """The models, the suite and the conditions of a run of ``reasoner eval``, and where its output goes."""

    settings: Settings
    more: Mapping[str, str]
    """Models to serve besides the policy, each with the option that names it."""
    suite: Suite
    verifier: VerifierSpec | None
    sampling: Sampling
    tools: list[PythonTool]
    concurrency: int
    out: Path | None
    as_json: bool

    def describe_conditions(self, seeds: int) -> dict[str, Any]:
        """Return the settings on which the results depend; a run is resumed only under the same ones."""
        settings, model = self.settings, self.settings.model_name
        question = JobRequest(problem="any", model=model, answer=self.suite.answer_spec, sampling=self.sampling)
        asked = resolve_program_job(question, settings.models)
        other: dict[str, Any] = {"tools": [tool.model_dump() for tool in self.tools]} if self.tools else {}
        if self.verifier is not None and (
            settings.prm_name is None or self.verifier != PrmVerifier(model=settings.prm_name)
        ):
            other["verifier"] = self.verifier.model_dump_json()
        return {
            "model": model,
            "system": asked.system,
            "prompt": asked.prompt,
            "prm": settings.prm_name,
            **other,
            "seeds": seeds,
            "temperature": asked.sampling.temperature,
            "max_tokens": asked.sampling.max_tokens,
            "thinking_tokens": asked.sampling.thinking_tokens,
            "draws": NUM_DRAWS,
            "calibration": None if settings.calibration is None else str(settings.calibration),
        }

    def identify_suite(self) -> dict[str, Any]:
        """Return what distinguishes the suite from others: its name, its size and a digest of its content."""
        content = blake2b(digest_size=8)
        for problem in self.suite.problems:
            content.update(repr((problem.id, problem.text, problem.answer, *problem.examples)).encode())
        return {"suite": self.suite.name, "problems": len(self.suite.problems), "content": content.hexdigest()}

    def run(
        self,
        plan: EvaluationPlan,
        header: Mapping[str, Any],
        *,
        num_stages: int,
        is_incomplete: Callable[[RunFile], bool],
        measure: Callable[[EvaluationContext, RunFile, Advance], Awaitable[None]],
    ) -> RunFile:
        """Measure what the file of runs in ``out`` lacks, with an engine and progress, and return the file.

        Raises ``typer.BadParameter`` if the folder has another evaluation.
        """
        console = Console(stderr=True)
        try:
            with RunFile(header, self.out) as file:
                if is_incomplete(file):
                    with (
                        _explain_interruption(console, self.out),
                        run_private_engine(self.settings, console, self.more) as urls,
                        _show_progress(console, self.suite.name, num_stages, plan.seeds) as advance,
                    ):
                        shutdown.run(self._measure(plan, urls, measure=measure, file=file, advance=advance))
        except EvaluationMismatch as error:
            raise typer.BadParameter(str(error), param_hint="--out") from None
        return file

    async def _measure(
        self,
        plan: EvaluationPlan,
        urls: tuple[str, ...],
        measure: Callable[[EvaluationContext, RunFile, Advance], Awaitable[None]],
        file: RunFile,
        advance: Advance,
    ) -> None:
        settings = self.settings
        engine = connect(settings, urls)
        try:
            context = await EvaluationContext.of(
                suite=self.suite,
                plan=plan,
                engine=engine,
                verifier=self.verifier,
                sampling=self.sampling,
                concurrency=self.concurrency,
                calibration=settings.read_calibration(),
                defaults=settings.models,
                tools=self.tools,
                prices=settings.prices,
            )
            await measure(context, file, advance)
        finally:
            await engine.close()


def list_failures(console: Console, file: RunFile) -> dict[str, str]:
    """Print the problems that could not be run, and return them with the reasons.

    Raises ``typer.Exit`` if nothing else was.
    """
    failures = {item.problem: item.failed for item in file.items if item.failed is not None}
    for problem, reason in failures.items():
        console.print(f"left out: {problem}: {reason}", markup=False)
    if all(item.problem in failures for item in file.items):
        raise typer.Exit(1)
    return failures


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


@contextlib.contextmanager
def _show_progress(console: Console, suite: str, num_stages: int, seeds: int) -> Iterator[Advance]:
    """Show progress as a bar on a terminal, and elsewhere as a line now and then."""
    titles: dict[Stage, str] = {}

    def find_title(stage: Stage) -> str:
        of_seeds = f", seed {stage.seed + 1} of {seeds}" if seeds > 1 else ""
        return titles.setdefault(stage, f"{suite} {len(titles) + 1}/{num_stages} {stage.name}{of_seeds}")

    if not console.is_terminal:

        def print_line(stage: Stage, done: int, total: int) -> None:
            title = find_title(stage)
            if done == total or done % max(1, total // NUM_PROGRESS_LINES) == 0:
                print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)

        yield print_line
        return
    with count_progress(console, shows_remaining=True) as bar:
        task = bar.add_task("starting", total=None)
        current: Stage | None = None

        def show(stage: Stage, done: int, total: int) -> None:
            nonlocal current
            if stage != current:
                bar.reset(task, total=total, description=find_title(stage))
                current = stage
            bar.update(task, completed=done)

        yield show
