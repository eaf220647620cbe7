"""``python -m benchmarks.real.sweep``: greedy decoding and a vote of 8 samples on many tasks, to choose tasks from.

The problems are training problems, so that no problem of the measurement takes part in the choice. Each finished
problem is a line of ``sweep.jsonl`` with its answers; an interrupted sweep continues.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from api.roles.private_service import run_private_engine
from benchmarks.real.tasks import CANDIDATES, MAX_TOKENS, MODEL_NAME, TEMPERATURE, find_model
from engine.protocol.types import EngineClient
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.calibrate.trials import open_suite_to_fit
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite
from reasoner.evaluation.unpinned_engine import UnpinnedEngine
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.view import fold_events
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive
from workers.config.settings import load_settings
from workers.engines.connect import connect

SAMPLES = 8
CONCURRENCY = 16
LEAST, MOST = 0.1, 0.8
"""Fractions of right samples between which a task is worth measuring."""


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """Means over the problems of a task."""

    task: str
    problems: int
    greedy: float
    sampled: float
    """Fraction of right samples."""
    majority: float
    reached: float
    """Fraction of problems that any sample solves."""
    answers: float
    """Different answers among the samples of a problem."""
    tokens: float

    @property
    def is_suitable(self) -> bool:
        """Return True if the model solves some and not most of it, and its samples differ in being right."""
        return LEAST <= self.sampled <= MOST and self.reached - self.sampled >= LEAST


def summarize(records: Iterable[dict[str, Any]]) -> list[TaskSummary]:
    """Return the summary of each task, in order of appearance."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    return [_summarize_task(task, group) for task, group in by_task.items()]


def _summarize_task(task: str, group: Sequence[dict[str, Any]]) -> TaskSummary:
    samples = [sample for record in group for sample in record["samples"]]
    count = len(group)
    return TaskSummary(
        task,
        count,
        greedy=sum(record["greedy"]["right"] for record in group) / count,
        sampled=sum(sample["right"] for sample in samples) / len(samples),
        majority=sum(record["majority"] for record in group) / count,
        reached=sum(any(sample["right"] for sample in record["samples"]) for record in group) / count,
        answers=sum(len({sample["answer"] for sample in record["samples"]}) for record in group) / count,
        tokens=sum(sample["tokens"] for sample in samples) / len(samples),
    )


def format_table(summaries: Sequence[TaskSummary]) -> str:
    """Return a Markdown table, the suitable tasks in bold."""
    lines = [
        f"| task | problems | greedy | samples | majority of {SAMPLES} | any of {SAMPLES} | answers | tokens |",
        "|---|" + "---:|" * 7,
    ]
    for item in sorted(summaries, key=lambda item: item.task):
        name = f"`{item.task.removeprefix('reasoning-gym:')}`"
        shares = " | ".join(f"{share:.0%}" for share in (item.greedy, item.sampled, item.majority, item.reached))
        name = f"**{name}**" if item.is_suitable else name
        lines.append(f"| {name} | {item.problems} | {shares} | {item.answers:.1f} | {item.tokens:.1f} |")
    return "\n".join(lines)


async def sweep(engine: EngineClient, suites: Sequence[Suite], path: Path, temperature: float) -> None:
    """Add a line to the file for each problem of each suite that it lacks."""
    engine = UnpinnedEngine(engine)
    done = {(record["task"], record["problem"]) for record in read_records(path)}
    slots = asyncio.Semaphore(CONCURRENCY)

    async def run(suite: Suite, problem: Problem) -> None:
        async with slots:
            record = await _measure(engine, suite, problem, temperature)
        with path.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    with keep_workers_alive():
        for suite in suites:
            async with asyncio.TaskGroup() as group:
                for problem in suite.problems:
                    if (suite.name, problem.id) not in done:
                        group.create_task(run(suite, problem))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the file, which need not exist; a last line that a crash truncated is removed."""
    if not path.exists():
        return []
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        path.write_bytes(complete)
    return [json.loads(line) for line in complete.splitlines()]


async def _measure(engine: EngineClient, suite: Suite, problem: Problem, temperature: float) -> dict[str, Any]:
    equal = Equivalence()
    results = []
    for strategy in ({"name": "greedy"}, {"name": "self_consistency", "n": SAMPLES}):
        journal = MemoryJournal()
        request = JobRequest.model_validate(
            {
                "messages": problem.to_messages(),
                "verifier": None,
                "strategy": strategy,
                "seed": 0,
                "answer": {"compare": suite.answer.compare, "instruct": False},
                "sampling": {"temperature": temperature, "max_tokens": MAX_TOKENS},
            }
        )
        outcome = await run_job(resolve_program_job(request), engine, journal)
        nodes = sorted(fold_events(journal.entries).nodes.values(), key=lambda node: node.path)[1:]  # the root is first
        samples = [
            {
                "answer": node.answer,
                "right": await suite.check(problem, node.answer, equal),
                "tokens": node.tokens,
            }
            for node in nodes
        ]
        results.append((samples, await suite.check(problem, outcome.result.answer, equal)))
    (greedy, _), (samples, majority) = results
    shared = {"task": suite.name, "problem": problem.id, "expected": problem.answer}
    return {**shared, "greedy": greedy[0], "majority": majority, "samples": samples}


def main() -> None:
    """Run the sweep with a private engine, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.sweep", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the installed SmolLM2")
    parser.add_argument("--problems", type=int, default=40, help="of each task (%(default)s)")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="of the samples (%(default)s)")
    parser.add_argument("--task", action="append", help="a suite to try; repeatable; default: the list in tasks.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for sweep.jsonl and sweep.md")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "sweep.jsonl"
    suites = [open_suite_to_fit(task, arguments.problems) for task in arguments.task or CANDIDATES]
    settings = load_settings(model=f"{MODEL_NAME}={arguments.model or find_model()}")

    async def run(urls: tuple[str, ...]) -> None:
        engine = connect(settings, urls)
        try:
            await sweep(engine, suites, path, arguments.temperature)
        finally:
            await engine.close()

    with run_private_engine(settings, Console(stderr=True)) as urls:
        asyncio.run(run(urls))
    table = format_table(summarize(read_records(path)))
    (arguments.out / "sweep.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
