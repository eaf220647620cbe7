"""What ``reasoner calibrate`` measures: for each problem a pool of scored samples, and every stage that may be chosen.

A trial is one run on one problem: its candidates with scores, whether they are right, and its bill. All are kept in a
file, a line each, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.types import EngineClient
from reasoner.answers import canonical
from reasoner.calibration import Calibration, CalibrationError
from reasoner.jobs import JobSpec, StrategySpec
from reasoner.journal import MemoryJournal
from reasoner.run import run_job
from reasoner.strict import Strict
from reasoner.suites import DEFAULT_SIZE, Problem, check, family, load

POOL = StrategySpec.model_validate({"name": "best_of_n", "n": 16})
"""Independent samples, all scored: any probe and any vote of up to so many is a part of them."""
PER_STAGE = 50
"""Draws for each problem wanted after which a level is taken to hold no more."""


class Candidate(Strict):
    """A branch that ended. ``generated`` and ``verified`` are its own tokens, those of its last node."""

    answer: str | None
    """In canonical form; ``None`` where it states none."""
    score: float | None
    right: bool
    generated: int
    verified: int


class Trial(Strict):
    """One run on one problem. Candidates are in the order of their paths; ``tokens`` is the whole bill, verifier
    included."""

    suite: str
    problem: str
    stage: str
    candidates: list[Candidate]
    tokens: int


def problems_to_fit(suite: str, limit: int) -> list[Problem]:
    """Held-out problems that no evaluation reports on (those of ``load`` are left out), the levels in equal parts.

    Fewer than ``limit`` where a level has no more. Raises ``ValueError`` for an unknown suite.
    """
    module = family(suite)
    taken = {problem.id for problem in load(suite, limit=DEFAULT_SIZE)}
    found: list[Problem] = []
    for level in module.LEVELS:
        wanted = -(-limit // len(module.LEVELS))
        for draw in range(PER_STAGE * wanted):
            if wanted == 0:
                break
            problem: Problem = module.problem("heldout", f"calibration/{draw}", level)
            if problem.id not in taken:
                taken.add(problem.id)
                found.append(problem)
                wanted -= 1
    return found


class TrialFile:
    """The trials so far. The first line says what they were measured with; another setting is another file."""

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        """Reads what is there. Raises ``CalibrationError`` when it was measured otherwise, or is no such file."""
        self._path = path
        self.trials: dict[tuple[str, str], Trial] = {}
        head = json.dumps(setting, sort_keys=True)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n")
            return
        lines = path.read_text().splitlines()
        if not lines or lines[0] != head:
            raise CalibrationError(f"{path} holds other measurements ({lines[:1]}); remove it or name another --out")
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._keep(Trial.model_validate_json(line))
            except ValidationError:
                if number < len(lines):  # only the last line may be half written
                    raise CalibrationError(f"{path}, line {number}: not a measurement; remove the line") from None
                path.write_text("\n".join(lines[:-1]) + "\n")

    def add(self, trial: Trial) -> None:
        self._keep(trial)
        with self._path.open("a") as file:
            file.write(trial.model_dump_json() + "\n")

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.problem, trial.stage] = trial


async def measure(
    problems: Sequence[Problem],
    stages: Sequence[StrategySpec],
    engine: EngineClient,
    file: TrialFile,
    *,
    seed: int,
    concurrency: int,
    calibration: Calibration | None,
    progress: Callable[[], None],
) -> None:
    """Runs each stage on each problem, but for what the file has. ``calibration`` is what stages stop by."""
    slots = asyncio.Semaphore(concurrency)

    async def one(problem: Problem, stage: StrategySpec) -> None:
        if (problem.id, stage_name(stage)) not in file.trials:
            async with slots:
                file.add(await _run(problem, stage, engine, seed, calibration))
        progress()

    await asyncio.gather(*(one(problem, stage) for stage in stages for problem in problems))


def stage_name(stage: StrategySpec) -> str:
    """A stage as a short text: the key of its trials."""
    return " ".join([stage.name, *(f"{name}={value}" for name, value in sorted(stage.params.items()))])


async def _run(
    problem: Problem, stage: StrategySpec, engine: EngineClient, seed: int, calibration: Calibration | None
) -> Trial:
    journal = MemoryJournal()
    spec = JobSpec(
        problem=problem.text,
        strategy=stage,
        sampling={"temperature": family(problem.suite).TEMPERATURE},
        answer="text",
        seed=seed,
    )
    outcome = await run_job(spec, engine, journal, calibration=calibration)
    ended: dict[str, dict[str, Any]] = {}
    parents: set[str] = set()
    for entry in journal.entries:
        if entry.type == "node":
            node = ended.setdefault(entry.data["node"], {"generated": 0, "verified": 0, "score": None})
            node["generated"] += entry.data["tokens"]
            node["answer"] = entry.data["answer"]
            parents.add(entry.data["parent"])
        elif entry.type == "score":
            ended[entry.data["node"]].update(score=entry.data["score"], verified=entry.data["computed"])
    leaves: dict[tuple[int, str | None], dict[str, Any]] = {}
    for path, node in sorted(ended.items(), key=lambda item: _path(item[0])):
        if path not in parents:  # of one first step an answer counts once, as in ``auto``
            leaves.setdefault((_path(path)[0], node["answer"]), node)
    return Trial(
        suite=problem.suite,
        problem=problem.id,
        stage=stage_name(stage),
        candidates=[
            Candidate(**node | {"answer": canonical(node["answer"]), "right": check(problem, node["answer"])})
            if node["answer"] is not None
            else Candidate(**node, right=False)
            for node in leaves.values()
        ],
        tokens=outcome.usage.total,
    )


def _path(node: str) -> tuple[int, ...]:
    return tuple(map(int, node.split(".")))
