"""``reasoner batch``: many problems under one budget, from a terminal."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from api.cli.jobs import EXTRA, AsJson, Key, Strategy, Url, client_of, name_strategy, strategy_options
from api.cli.render import output, plain
from reasoner.client import Client
from reasoner.jobs.batch import Batch, BatchJob
from reasoner.jobs.job import TERMINAL_STATUSES, Job

POLL_SECONDS = 0.5
MAX_EXPLAINED = 100
"""Jobs that are asked why they failed, at most."""
_LINE_CHARS = 80

batch = typer.Typer(no_args_is_help=True)
_progress = Console(stderr=True)
_out = output()


@batch.command(context_settings=EXTRA)
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help='JSON lines: a job each, at least {"problem": …}.')],
    tokens: Annotated[int, typer.Option(min=1, help="What all jobs together may spend.")],
    strategy: Strategy = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the batch to its end. Exit status 1 when a job failed.")
    ] = False,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Submit the jobs of a file. --strategy and its parameters, such as --n 64, are for lines that name none."""
    jobs = _read(file)
    options = strategy_options(context.args)
    if strategy is not None or options:
        usual = ({} if strategy is None else {"name": strategy}) | options
        jobs = [{"strategy": usual} | job for job in jobs]
    with client_of(url, key) as client:
        named = [name_strategy(job, client) for job in jobs]
        found = client.submit_batch({"jobs": named, "budget": {"tokens": tokens}})
        if wait:
            _progress.print(f"{found.id}: {len(jobs)} jobs", markup=False, highlight=False)
            found = _follow(client, found)
        _print(found, as_json)
        lost = [job for job in found.jobs or () if job.status in ("failed", "cancelled")]
        if wait and lost:
            _explain(client, lost, len(jobs))
            raise typer.Exit(1)


@batch.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last batch of the previous page.")] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List batches, newest first."""
    with client_of(url, key) as client:
        page = client.list_batches(limit=limit, after=after)
    if as_json:
        print(json.dumps(page, indent=2))
        return
    table = Table(Column("batch", no_wrap=True), "status", "jobs", "tokens", "of", box=None)
    for found in (Batch.model_validate(item) for item in page["data"]):
        count = sum(found.counts.values())
        table.add_row(found.id, found.status, str(count), str(found.usage.total), str(found.budget.tokens))
    _out.print(table)


@batch.command()
def show(batch_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Show a batch and its jobs."""
    with client_of(url, key) as client:
        _print(client.batch(batch_id), as_json)


@batch.command()
def watch(batch_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Follow a batch until all of its jobs have ended."""
    with client_of(url, key) as client:
        _print(_follow(client, client.batch(batch_id)), as_json)


@batch.command()
def cancel(batch_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Cancel all jobs of a batch; what they have spent stays on their bills."""
    with client_of(url, key) as client:
        _print(_follow(client, client.cancel_batch(batch_id)), as_json)


def _read(file: Path) -> list[dict[str, Any]]:
    """The jobs of a file. Empty lines are skipped; a bad one is named."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="FILE") from None
    jobs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = json.loads(line)
        except json.JSONDecodeError as error:
            job = str(error)
        if not isinstance(job, dict):
            shown = line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "…"
            message = f'{file}, line {number}: not a job, which is a JSON object like {{"problem": …}}: {shown}'
            raise typer.BadParameter(message, param_hint="FILE")
        jobs.append(job)
    if not jobs:
        raise typer.BadParameter(f"{file} holds no jobs: write one JSON object a line", param_hint="FILE")
    return jobs


def _follow(client: Client, found: Batch) -> Batch:
    """Shows the progress until all jobs have ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_progress, transient=True) as progress:
        task = progress.add_task("", total=sum(found.counts.values()))
        while True:
            ended = sum(count for status, count in found.counts.items() if status in TERMINAL_STATUSES)
            spent = f"{found.status}: {found.usage.total} of {found.budget.tokens} tokens"
            progress.update(task, completed=ended, description=spent)
            if found.finished_at is not None:
                return found
            time.sleep(POLL_SECONDS)
            found = client.batch(found.id)


def _explain(client: Client, lost: Sequence[BatchJob], count: int) -> None:
    """Say why jobs have no result, each reason once."""
    reasons = Counter(
        "cancelled" if job.status == "cancelled" else _reason(client.get(job.id)) for job in lost[:MAX_EXPLAINED]
    )
    _progress.print(f"{len(lost)} of {count} jobs did not end well:", markup=False, highlight=False)
    for reason, jobs in reasons.most_common():
        _progress.print(f"  {jobs} × {reason}", markup=False, highlight=False, soft_wrap=True)
    if len(lost) > MAX_EXPLAINED:
        _progress.print(f"  and {len(lost) - MAX_EXPLAINED} that were not looked at", markup=False, highlight=False)


def _reason(job: Job) -> str:
    return job.status if job.error is None else f"{job.error.code}: {plain(job.error.message)}"


def _print(found: Batch, as_json: bool) -> None:
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    counts = ", ".join(f"{count} {status}" for status, count in found.counts.items() if count)
    _out.print(Text(f"{found.id}  {found.status}: {counts}", style="bold"))
    _out.print(Text(f"  {found.usage.total} of {found.budget.tokens} tokens, {found.unassigned} unassigned"))
    table = Table(Column("job", no_wrap=True), "status", "tokens", "granted", "answer", box=None)
    for job in found.jobs or ():
        table.add_row(job.id, job.status, str(job.tokens), str(job.granted), Text(job.answer or ""))
    _out.print(table)
