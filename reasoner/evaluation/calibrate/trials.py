"""Measurements of ``reasoner calibrate``: for each problem a pool of scored samples, and every selectable stage.

A trial is one run on one problem: its candidates with scores and correctness, and its bill. Trials are kept in a file,
one per line, so that an interrupted measurement can be resumed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.protocol.types import EngineClient
from engine.text.json_lines import NotUtf8, read_json_lines
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.base_model import StrictModel
from reasoner.confidence.calibration import Calibration, CalibrationError
from reasoner.evaluation.suites.problem import Problem, hash_problem
from reasoner.evaluation.suites.registry import DEFAULT_SIZE, SUITES, get_family, load_problems, open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.jobs.view import NodeView, fold_events
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive

POOL = StrategySpec.model_validate({"name": "best_of_n", "n": 16})
"""Strategy of the pool: independent scored samples, of which every probe and every vote takes a part."""
VOTING_POOL = StrategySpec.model_validate({"name": "self_consistency", "n": 16})
"""Strategy of the pool where no verifier scores samples."""
GYM_SEED = 1_000_003
"""Seed of the problems that reasoning-gym generates for a fit; evaluations start at 0."""
Ask = Callable[[Suite, JobRequest], JobSpec]
"""Completes a job on a suite with the model, its settings and the verifier."""
PER_STAGE = 50
"""Attempts per problem after which a level counts as exhausted."""


class Candidate(StrictModel):
    """A branch that ended. ``generated`` and ``verified`` count the tokens of its last node alone."""

    answer: str | None
    """Answer in canonical form; ``None`` if the branch states none."""
    score: float | None
    right: bool
    generated: int
    verified: int


class Trial(StrictModel):
    """One run on one problem. Candidates are in path order; ``tokens`` includes the verifier's."""

    suite: str
    problem: str
    stage: str
    candidates: list[Candidate]
    tokens: int


def open_suite_to_fit(where: str, limit: int) -> Suite:
    """Open a suite like ``open_suite``, if possible with problems that no evaluation of it reports on.

    Bundled suites and reasoning-gym generate such problems; a file has no others. Raises ``SuiteError``.
    """
    if where in SUITES:
        return replace(open_suite(where, limit=1), problems=problems_to_fit(where, limit))
    return open_suite(where, limit=limit, seed=GYM_SEED, apart_from=[0])


def problems_to_fit(suite: str, limit: int) -> list[Problem]:
    """Return held-out problems that no evaluation reports on, equally many of each level.

    Fewer than ``limit`` if a level is exhausted. Raises ``ValueError`` for an unknown suite.
    """
    module = get_family(suite)
    taken = {problem.id for problem in load_problems(suite, limit=DEFAULT_SIZE)}
    problems: list[Problem] = []
    per_level = -(-limit // len(module.LEVELS))
    for level in module.LEVELS:
        chosen: dict[str, Problem] = {}
        for attempt in range(PER_STAGE * per_level):
            if len(chosen) == per_level:
                break
            problem: Problem = module.generate_problem("heldout", f"calibration/{attempt}", level)
            if problem.id not in taken:
                chosen[problem.id] = problem
        problems += chosen.values()
    return problems


class TrialFile:
    """File of trials. The first line holds the settings of the measurement; other settings need another file."""

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        """Read existing trials. Raises ``CalibrationError`` for other settings or an invalid file."""
        self._path = path
        self.trials: dict[tuple[str, str], Trial] = {}
        head = json.dumps(setting, sort_keys=True)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n")
            return
        try:
            lines = [line for _, line in read_json_lines(path)]
        except NotUtf8 as error:
            raise CalibrationError(f"{path} holds no measurements ({error}); remove it or name another --out") from None
        if not lines or lines[0] != head:
            raise CalibrationError(f"{path} holds other measurements ({lines[:1]}); remove it or name another --out")
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._keep(Trial.model_validate_json(line))
            except ValidationError:
                if number < len(lines):  # only the last line may be truncated
                    raise CalibrationError(f"{path}, line {number}: not a measurement; remove the line") from None
                path.write_text("\n".join(lines[:-1]) + "\n")

    def add(self, trial: Trial) -> None:
        self._keep(trial)
        with self._path.open("a") as file:
            file.write(trial.model_dump_json() + "\n")

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.problem, trial.stage] = trial


async def measure(
    suites: Sequence[Suite],
    stages: Sequence[StrategySpec],
    engine: EngineClient,
    file: TrialFile,
    *,
    seed: int,
    concurrency: int,
    calibration: Calibration | None,
    ask: Ask,
    progress: Callable[[], None],
) -> None:
    """Run each stage on each problem that the file lacks. ``calibration`` is the table by which stages stop.

    Raises the first error, after cancelling all other runs.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run_once(suite: Suite, problem: Problem, stage: StrategySpec) -> None:
        if (get_problem_key(problem), get_stage_name(stage)) not in file.trials:
            async with slots:
                file.add(
                    await _run_trial(
                        suite, problem, stage=stage, engine=engine, seed=seed, calibration=calibration, ask=ask
                    )
                )
        progress()

    try:
        with keep_workers_alive():
            async with asyncio.TaskGroup() as group:
                for stage, suite in itertools.product(stages, suites):
                    for problem in suite.problems:
                        group.create_task(run_once(suite, problem, stage))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def get_problem_key(problem: Problem) -> str:
    """Return the key of a problem in trials. It includes text and answer, since a line of a file may change."""
    if problem.suite in SUITES:
        return problem.id
    return f"{problem.id} {hash_problem(json.dumps([problem.suite, problem.text, problem.answer])):016x}"


def get_stage_name(stage: StrategySpec) -> str:
    """Return the name of a stage, which is the key of its trials."""
    return " ".join([stage.name, *(f"{name}={value}" for name, value in sorted(stage.params.items()))])


async def _run_trial(
    suite: Suite,
    problem: Problem,
    stage: StrategySpec,
    engine: EngineClient,
    seed: int,
    calibration: Calibration | None,
    ask: Ask,
) -> Trial:
    journal, equal = MemoryJournal(), Equivalence()
    request = JobRequest.model_validate(
        {**problem.to_job_fields(), "strategy": stage, "answer": suite.answer_spec, "seed": seed}
    )
    outcome = await run_job(ask(suite, request), engine, journal, calibration=calibration)
    nodes = sorted(fold_events(journal.entries).nodes.values(), key=lambda node: node.path)[1:]  # the root is first
    if any(node.answer_level == "strict" for node in nodes):
        for node in nodes:  # as in a vote, flexible answers count only if there is no strict one
            node.answer = None if node.answer_level == "flexible" else node.answer
    leaves: dict[tuple[int, str | None], NodeView] = {}
    for node in nodes:
        if not node.children:  # as in ``auto``, an answer counts once per first step
            leaves.setdefault((node.path[0], node.answer), node)
    candidates: list[Candidate] = []
    for (_, stated), node in leaves.items():
        form = None if stated is None else canonicalize(stated)
        if form is not None and suite.answer.compare == "math":  # as in a vote, "1/2" and "0.5" are one answer
            forms = dict.fromkeys(candidate.answer for candidate in candidates if candidate.answer is not None)
            form = await equal.representative(form, list(forms))
        right = await suite.check(problem, stated, equal)
        candidates.append(
            Candidate(answer=form, score=node.score, right=right, generated=node.tokens, verified=node.verifier_tokens)
        )
    return Trial(
        suite=suite.name,
        problem=get_problem_key(problem),
        stage=get_stage_name(stage),
        candidates=candidates,
        tokens=outcome.usage.total,
    )
