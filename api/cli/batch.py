"""``reasoner batch``: many problems under one budget."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from api.cli.console import count_progress, print_json, result_console
from api.cli.job_options import EXTRA, Strategy, build_strategy, name_strategy
from api.cli.options import PageSize, ServiceOptions, expand_options
from api.cli.render import plain
from engine.text.json_lines import NotUtf8, read_json_lines
from reasoner.client import Client
from reasoner.jobs.batch import Batch, BatchJob
from reasoner.jobs.job import Job

POLL_SECONDS = 0.5
MAX_EXPLAINED_JOBS = 100
"""Failed jobs that are fetched to explain why they failed."""
_MAX_LINE_CHARS = 80

batch = typer.Typer(no_args_is_help=True)
_progress = Console(stderr=True)
_out = result_console()


@batch.command(context_settings=EXTRA)
@expand_options
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help='JSON Lines: one job a line, at least {"problem": …}.')],
    tokens: Annotated[int, typer.Option(min=1, help="Token budget of all jobs together.")],
    service: ServiceOptions,
    strategy: Strategy = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for its end. Exit status 1 if a job failed or was cancelled.")
    ] = False,
) -> None:
    """Submit the jobs of a file. --strategy and its parameters, such as --n 64, are for jobs that name none."""
    jobs = _read_jobs(file)
    if default := build_strategy(strategy, context.args):
        jobs = [{"strategy": default} | job for job in jobs]
    with service.connect() as client:
        jobs = [name_strategy(job, client, job.get("model")) for job in jobs]
        submitted = client.submit_batch({"jobs": jobs, "budget": {"tokens": tokens}})
        if wait:
            _progress.print(f"{submitted.id}: {len(jobs)} jobs", markup=False, highlight=False)
            submitted = _follow(client, submitted)
        _print(submitted, service.as_json)
        failed = [job for job in submitted.jobs or () if job.status in ("failed", "cancelled")]
        if wait and failed:
            _explain_failures(client, failed, len(jobs))
            raise typer.Exit(1)


@batch.command()
@expand_options
def run(
    file: Annotated[Path, typer.Argument(help="JSON Lines, as OpenAI's batches take them: one request a line.")],
    out: Annotated[Path, typer.Option(help="The file for the answers; those without one go to OUT.errors.")],
    service: ServiceOptions,
    endpoint: Annotated[str, typer.Option(help="The endpoint of all lines: their 'url'.")] = "/v1/chat/completions",
    tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of all lines together.")] = None,
    window: Annotated[
        str, typer.Option(help="The time at which unfinished lines become errors: 90m, 24h, 7d.")
    ] = "24h",
) -> None:
    """Run the requests of a file, and write their answers. Exit status 1 if a line has none."""
    spec: dict[str, Any] = {"endpoint": endpoint, "completion_window": window}
    if tokens is not None:
        spec["budget"] = {"tokens": tokens}
    with service.connect() as client:
        spec["input_file_id"] = client.upload_file(file)["id"]
        followed = client.submit_batch(spec)
        _progress.print(f"{followed.id}: {file}", markup=False, highlight=False)
        followed = _follow(client, followed)
        for file_id, path in ((followed.output_file_id, out), (followed.error_file_id, Path(f"{out}.errors"))):
            if file_id is not None:
                client.download_file(file_id, path)
        _print(followed, service.as_json)
    if followed.status != "completed" or followed.request_counts.failed:
        raise typer.Exit(1)


@batch.command("list")
@expand_options
def list_batches(
    service: ServiceOptions,
    limit: PageSize = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last batch of the previous page.")] = None,
) -> None:
    """List batches, newest first."""
    with service.connect() as client:
        page = client.list_batches(limit=limit, after=after)
    if service.as_json:
        print_json(page)
        return
    table = Table(Column("batch", no_wrap=True), "status", "requests", "tokens", "of", box=None)
    for listed in (Batch.model_validate(item) for item in page["data"]):
        budget = "" if listed.budget is None else str(listed.budget.tokens)
        table.add_row(listed.id, listed.status, str(listed.request_counts.total), str(listed.usage.total), budget)
    _out.print(table)


@batch.command()
@expand_options
def show(batch_id: str, service: ServiceOptions) -> None:
    """Show a batch and its jobs."""
    with service.connect() as client:
        _print(client.batch(batch_id), service.as_json)


@batch.command()
@expand_options
def watch(batch_id: str, service: ServiceOptions) -> None:
    """Follow a batch until all of its jobs have ended."""
    with service.connect() as client:
        _print(_follow(client, client.batch(batch_id)), service.as_json)


@batch.command()
@expand_options
def cancel(batch_id: str, service: ServiceOptions) -> None:
    """Cancel all jobs of a batch; the tokens they have used stay on their bills."""
    with service.connect() as client:
        _print(_follow(client, client.cancel_batch(batch_id)), service.as_json)


def _read_jobs(file: Path) -> list[dict[str, Any]]:
    """Return the jobs of a file, skipping empty lines. Raises ``typer.BadParameter``, which names a bad line."""
    try:
        lines = list(read_json_lines(file))
    except (OSError, NotUtf8) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="FILE") from None
    jobs = []
    for number, line in lines:
        try:
            job = json.loads(line)
        except json.JSONDecodeError as error:
            job = str(error)
        if not isinstance(job, dict):
            shown = line if len(line) <= _MAX_LINE_CHARS else line[:_MAX_LINE_CHARS] + "…"
            message = f'{file}, line {number}: not a job, which is a JSON object such as {{"problem": …}}: {shown}'
            raise typer.BadParameter(message, param_hint="FILE")
        jobs.append(job)
    if not jobs:
        raise typer.BadParameter(f"{file} contains no jobs: write one JSON object a line", param_hint="FILE")
    return jobs


def _follow(client: Client, followed: Batch) -> Batch:
    """Show the progress until all jobs have ended."""
    with count_progress(_progress, transient=True) as progress:
        task = progress.add_task("")
        while True:
            counts = followed.request_counts
            spent = f"{followed.status}: {_describe_tokens(followed)}"
            progress.update(task, total=counts.total, completed=counts.completed + counts.failed, description=spent)
            if followed.has_ended:
                return followed
            time.sleep(POLL_SECONDS)
            followed = client.batch(followed.id)


def _explain_failures(client: Client, failed: Sequence[BatchJob], num_jobs: int) -> None:
    """Print why jobs failed or were cancelled, each reason once with the number of jobs."""
    reasons = Counter(
        "cancelled" if job.status == "cancelled" else _failure_reason(client.get(job.id))
        for job in failed[:MAX_EXPLAINED_JOBS]
    )
    _progress.print(f"{len(failed)} of {num_jobs} jobs failed or were cancelled:", markup=False, highlight=False)
    for reason, count in reasons.most_common():
        _progress.print(f"  {count} × {reason}", markup=False, highlight=False, soft_wrap=True)
    if len(failed) > MAX_EXPLAINED_JOBS:
        _progress.print(f"  and {len(failed) - MAX_EXPLAINED_JOBS} more", markup=False, highlight=False)


def _failure_reason(job: Job) -> str:
    return job.status if job.error is None else f"{job.error.code}: {plain(job.error.message)}"


def _describe_tokens(shown: Batch) -> str:
    of = "" if shown.budget is None else f" of {shown.budget.tokens}"
    return f"{shown.usage.total}{of} tokens"


def _print(shown: Batch, as_json: bool) -> None:
    if as_json:
        print(shown.model_dump_json(indent=2))
        return
    counts = ", ".join(f"{count} {status}" for status, count in shown.counts.items() if count)
    requests = "" if shown.jobs is not None else f"{shown.request_counts.total} requests; "
    _out.print(Text(f"{shown.id}  {shown.status}: {requests}{counts}", style="bold"))
    unassigned = "" if shown.unassigned is None else f", {shown.unassigned} unassigned"
    _out.print(Text(f"  {_describe_tokens(shown)}{unassigned}"))
    for name, file_id in (("output", shown.output_file_id), ("error", shown.error_file_id)):
        if file_id is not None:
            _out.print(Text(f"  {name} file {file_id}"))
    for error in shown.errors.data if shown.errors is not None else ():
        _out.print(Text(f"  {'' if error.line is None else f'line {error.line}: '}{error.message}"))
    if shown.jobs is None:
        return
    table = Table(Column("job", no_wrap=True), "status", "tokens", "granted", "answer", box=None)
    for job in shown.jobs:
        table.add_row(job.id, job.status, str(job.tokens), str(job.granted), Text(job.answer or ""))
    _out.print(table)
