"""``reasoner demo``: a whole service on this machine that solves a few held-out problems while you watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api.cli.render import print_tree
from api.roles.private_service import run_private_service
from reasoner.client import Client, ServiceError
from reasoner.evaluation.suites.countdown import make_problem
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import check_answer, get_family, load_problems
from reasoner.jobs.job import TERMINAL_STATUSES, Job
from reasoner.jobs.view import JobView
from workers.config.settings import load_settings

REFRESH_SECONDS = 0.1
SEED = 7
QUESTION = ((3, 7, 8, 12), 24)
"""Numbers and target of the first question in the README."""
CONCURRENCY = 8
"""Jobs that are solved at the same time."""

_WAITING_LOCK = threading.Lock()


@dataclass(slots=True)
class Case:
    """A problem with its strategy and budget, and the state of its job."""

    problem: Problem
    strategy: dict[str, Any]
    budget: dict[str, Any]
    seed: int = SEED
    job: Job | None = None
    view: JobView = field(default_factory=JobView)
    failure: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or (self.job is not None and self.job.status in TERMINAL_STATUSES)

    @property
    def is_right(self) -> bool:
        """True if the job has the right answer."""
        result = None if self.job is None else self.job.result
        return check_answer(self.problem, None if result is None else result.answer)


def build_cases() -> list[Case]:
    """Return the jobs of the demo: one problem by several strategies, and problems of both suites."""
    countdown, words = load_problems("countdown", limit=9), load_problems("words", limit=9)
    question = make_problem(*QUESTION)
    return [
        Case(question, {"name": "greedy"}, {"tokens": 500}),
        Case(question, {"name": "weighted_vote", "n": 64}, {"tokens": 8000}),
        Case(question, {"name": "rebase", "n": 32}, {"tokens": 4000}),
        Case(countdown[4], {"name": "particle", "n": 64}, {"tokens": 8000}),
        Case(words[1], {"name": "greedy"}, {"tokens": 500}),
        Case(words[1], {"name": "self_consistency", "n": 16}, {"tokens": 3000}),
        Case(words[4], {"name": "weighted_vote", "n": 32}, {"tokens": 8000}),
        Case(words[7], {"name": "weighted_vote", "n": 64}, {"tokens": 600}),
    ]


def demo(
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of times each problem is solved, each time with another seed.")
    ] = 1,
) -> None:
    """Start a service, solve sample problems over REST while showing the search, and print a table. Ctrl-C stops it."""
    settings = load_settings()
    settings.require_prm("reasoner demo")
    console = Console()
    console.print("Reasoner demo: API, worker, engine, verifier and broker, all on this machine, for this run only.\n")
    started = time.monotonic()
    with run_private_service(settings, console) as url:
        console.print(f"The service is up at {url} after {time.monotonic() - started:.0f} s.\n")
        rows = [
            [replace(case, seed=SEED + offset, view=JobView()) for offset in range(seeds)] for case in build_cases()
        ]
        all_cases = [case for row in rows for case in row]
        waiting = iter([case for column in zip(*rows, strict=True) for case in column])
        with Live(_build_table(rows), console=console, refresh_per_second=8) as live:
            threads = [
                threading.Thread(target=_solve_waiting, args=(url, waiting), daemon=True) for _ in range(CONCURRENCY)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(REFRESH_SECONDS)
                    live.update(_build_table(rows))
            live.update(_build_table(rows))
        with Client(url) as client:
            shown_case = next(
                (case for case in all_cases if case.strategy["name"] == "rebase" and case.job is not None), None
            )
            if shown_case is not None and shown_case.job is not None:
                console.print(f"\nThe search by rebase on: {shown_case.problem.text}", markup=False)
                print_tree(console, client.tree(shown_case.job.id), max_nodes=24)
    if seeds == 1:
        console.print("\nThat was one seed; 'reasoner demo --seeds 40' shows how often each row is right.")
    console.print("\nEverything is stopped. Next: 'reasoner serve', then the README's first curl.")
    failed = [case for case in all_cases if case.failure is not None]
    for case in failed:
        console.print(f"{case.strategy['name']}: {case.failure}", markup=False, style="red")
    if failed:
        raise typer.Exit(1)


def _solve_waiting(url: str, waiting: Iterator[Case]) -> None:
    while (case := _next_case(waiting)) is not None:
        _solve(url, case)


def _next_case(waiting: Iterator[Case]) -> Case | None:
    with _WAITING_LOCK:
        return next(waiting, None)


def _solve(url: str, case: Case) -> None:
    spec = {
        "problem": case.problem.text,
        "strategy": case.strategy,
        "budget": case.budget,
        "sampling": {"temperature": get_family(case.problem.suite).TEMPERATURE},
        "answer": "text",
        "seed": case.seed,
        "metadata": {"suite": case.problem.suite, "problem": case.problem.id},
    }
    try:
        with Client(url) as client:
            case.job = client.submit(spec)
            for event in client.events(case.job.id):
                case.view.apply(event)
            case.job = client.get(case.job.id)
            if case.job.error is not None:
                case.failure = case.job.error.message
    except ServiceError as error:
        case.failure = str(error)


def _build_table(rows: list[list[Case]]) -> Table:
    table = Table(
        "problem", "strategy", "budget", "state", "tokens", "s", "answer", "right?", box=SIMPLE_HEAD, padding=0
    )
    for column in table.columns:
        column.no_wrap = column.header != "answer"
    for row in rows:
        case, jobs = row[0], [case.job for case in row if case.has_ended and case.job is not None]
        tokens = sum(job.usage.total for job in jobs) / len(jobs) if jobs else case.view.tokens
        table.add_row(
            f"{case.problem.suite} {case.problem.level}",
            " ".join(str(part) for part in case.strategy.values()),
            ", ".join(f"{value} {name[:3]}" for name, value in case.budget.items()),
            _describe_state(row),
            f"{tokens:.0f}",
            f"{sum(job.usage.seconds for job in jobs) / len(jobs):.1f}" if jobs else "",
            _describe_answer(case) if len(row) == 1 else "",
            _describe_verdict(row),
        )
    return table


def _describe_state(row: list[Case]) -> str:
    case = row[0]
    if len(row) > 1:
        return f"{sum(case.has_ended for case in row)} of {len(row)}"
    if case.failure is not None:
        return "failed"
    if case.view.status == "in_progress":
        return f"{case.view.num_ended} branches"
    return case.view.status


def _describe_answer(case: Case) -> Text:
    result = None if case.job is None else case.job.result
    return Text((result.answer or "none") if result is not None else "")


def _describe_verdict(row: list[Case]) -> str:
    ended = [case for case in row if case.has_ended and case.failure is None]
    num_right = sum(case.is_right for case in ended)
    if len(row) > 1:
        return f"{num_right} of {len(ended)}"
    if not ended:
        return ""
    return "[green]yes[/green]" if num_right else "[red]no[/red]"
