"""``reasoner demo``: everything on this machine, a handful of held-out problems, watched while they are solved."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api.client import ServiceClient, ServiceError
from api.show import Progress, print_tree
from api.stack import private_stack
from reasoner.jobs import TERMINAL, Job
from reasoner.suites import Problem, check, family, load
from workers.settings import load_settings

REFRESH = 0.1


@dataclass(slots=True)
class Case:
    """A problem, how it is to be solved, and how far that is."""

    problem: Problem
    strategy: dict[str, Any]
    budget: dict[str, Any]
    job: Job | None = None
    progress: Progress = field(default_factory=Progress)
    failure: str | None = None

    @property
    def ended(self) -> bool:
        return self.failure is not None or (self.job is not None and self.job.status in TERMINAL)


def cases() -> list[Case]:
    """The demo's jobs: the same problem by several strategies, and both families of problems."""
    countdown, words = load("countdown", limit=9), load("words", limit=9)
    return [
        Case(countdown[1], {"name": "greedy"}, {"tokens": 500}),
        Case(countdown[1], {"name": "best_of_n", "n": 16}, {"tokens": 4000}),
        Case(countdown[1], {"name": "beam", "n": 16}, {"tokens": 4000}),
        Case(countdown[4], {"name": "beam", "n": 64}, {"seconds": 20}),
        Case(words[1], {"name": "greedy"}, {"tokens": 500}),
        Case(words[1], {"name": "self_consistency", "n": 16}, {"tokens": 3000}),
        Case(words[4], {"name": "weighted_vote", "n": 32}, {"tokens": 8000}),
        Case(words[7], {"name": "weighted_vote", "n": 64}, {"tokens": 600}),
    ]


def demo() -> None:
    """Start everything, solve sample problems over REST, show the search live, print the table. Ctrl-C stops it."""
    console = Console()
    console.print("Reasoner demo: API, worker, engine, verifier and broker, all on this machine, for this run only.\n")
    started = time.monotonic()
    with private_stack(load_settings(), console) as url:
        console.print(f"The service is up at {url} after {time.monotonic() - started:.0f} s.\n")
        todo = cases()
        with Live(_table(todo), console=console, refresh_per_second=8) as live:
            threads = [threading.Thread(target=_solve, args=(url, case), daemon=True) for case in todo]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(REFRESH)
                    live.update(_table(todo))
            live.update(_table(todo))
        with ServiceClient(url) as client:
            searched = next((case for case in todo if case.strategy["name"] == "beam" and case.job is not None), None)
            if searched is not None and searched.job is not None:
                console.print(f"\nThe beam search on: {searched.problem.text}", markup=False)
                print_tree(console, client.tree(searched.job.id), most=24)
    console.print("\nEverything is stopped. Next: 'reasoner serve', then the README's first curl.")
    failed = [case for case in todo if case.failure is not None]
    for case in failed:
        console.print(f"{case.strategy['name']}: {case.failure}", markup=False, style="red")
    if failed:
        raise typer.Exit(1)


def _solve(url: str, case: Case) -> None:
    spec = {
        "problem": case.problem.text,
        "strategy": case.strategy,
        "budget": case.budget,
        "sampling": {"temperature": family(case.problem.suite).TEMPERATURE},
        "answer": "text",
        "seed": 7,
        "metadata": {"suite": case.problem.suite, "problem": case.problem.id},
    }
    try:
        with ServiceClient(url) as client:
            case.job = client.submit(spec)
            for event in client.events(case.job.id):
                case.progress.take(event)
            case.job = client.get(case.job.id)
            if case.job.error is not None:
                case.failure = case.job.error.message
    except ServiceError as error:
        case.failure = str(error)


def _table(todo: list[Case]) -> Table:
    table = Table(
        "problem", "strategy", "budget", "state", "tokens", "s", "answer", "right?", box=SIMPLE_HEAD, padding=0
    )
    for column in table.columns:
        column.no_wrap = column.header != "answer"
    for case in todo:
        job, result = case.job, None if case.job is None else case.job.result
        done = case.ended and job is not None
        table.add_row(
            f"{case.problem.suite} {case.problem.level}",
            " ".join(str(part) for part in case.strategy.values()),
            ", ".join(f"{value} {name[:3]}" for name, value in case.budget.items()),
            _state(case),
            str(job.usage.total if done and job is not None else case.progress.tokens),
            f"{job.usage.seconds:.1f}" if done and job is not None else "",
            Text((result.answer or "none") if result is not None else ""),
            _verdict(case),
        )
    return table


def _state(case: Case) -> str:
    if case.failure is not None:
        return "failed"
    if case.progress.state == "in_progress":
        return f"{case.progress.branches} branches"
    return case.progress.state


def _verdict(case: Case) -> str:
    if not case.ended or case.failure is not None or case.job is None:
        return ""
    answer = None if case.job.result is None else case.job.result.answer
    return "[green]yes[/green]" if check(case.problem, answer) else "[red]no[/red]"
