"""``reasoner solve``, ``reasoner jobs`` and ``reasoner models``: the REST API on the command line.

With ``--json`` a command prints exactly one JSON document on stdout; progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from api.cli.console import print_json, result_console
from api.cli.job_filters import JobFilters
from api.cli.job_options import EXTRA, JobOptions, Question, list_more_models, name_models, name_strategy
from api.cli.options import Connection, PageSize, ServiceOptions, expand_options, parse_time
from api.cli.render import plain, print_job, print_tree, show_progress, watch_tree
from engine.remote.proxies import client_options
from reasoner.client import Client, ServiceError
from reasoner.jobs.job import TERMINAL_STATUSES, Job
from reasoner.tree_picture import draw_tree
from workers.config.address import find_service_url
from workers.processes.quiet_imports import end_quietly


def _check_picture(path: Path | None) -> Path | None:
    """Raise ``typer.BadParameter`` for a file that cannot be written, before the search begins."""
    if path is not None and (path.suffix.lower() != ".png" or path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path}: give a file that ends in .png, in a folder that exists")
    return path


Picture = Annotated[Path | None, typer.Option(callback=_check_picture, help="Draw the search tree into this PNG file.")]

MAX_PROBLEM_CHARS = 48
"""Characters of a question that the list of jobs shows."""

jobs = typer.Typer(no_args_is_help=True)
_progress = Console(stderr=True)
_out = result_console()


@expand_options
def solve(
    context: typer.Context, problem: Question, options: JobOptions, service: ServiceOptions, picture: Picture = None
) -> None:
    """Answer one question. Parameters of the strategy are options too, such as --n 16 or --expansions 4.

    Uses the service at --url or on the configured port; if none runs there, starts one for this question. Ctrl-C
    cancels the job.
    """
    spec = options.build_spec(problem, context.args)
    more = list_more_models(spec.get("verifier"), options.mixed)
    with open_service(service, options.model, more) as (client, model):
        job = client.submit(name_models(name_strategy(spec, client, options.model), client, model, options.mixed))
        try:
            show_progress(client, job, _progress)
        except KeyboardInterrupt:
            _cancel(client, job.id)
            raise
        job = client.get(job.id)
        tree = client.tree(job.id)
    _show(job, tree, picture, service.as_json)
    if job.status != "completed":
        raise typer.Exit(1)


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except ServiceError as error:  # a private service may have been stopped by the same Ctrl-C
        _progress.print(f"{job_id} was not cancelled: {error}", markup=False)
    else:
        _progress.print(f"{job_id} is cancelled", markup=False)


@contextlib.contextmanager
def open_service(
    service: Connection, model: str | None, more: Sequence[str] = ()
) -> Iterator[tuple[Client, str | None]]:
    """Yield a client and the served name of the model.

    The service is the one at ``url``, else the one on the configured port, else a private one for the time of the
    command, which also serves the bundled models among ``more``.
    """
    if service.url is not None or _is_running(find_service_url()):
        with service.connect() as client:
            yield client, model
        return
    with end_quietly():
        from api.roles.private_service import run_private_service
        from reasoner.admission.names import find_model, find_name
        from workers.config.settings import load_settings
    settings = load_settings()
    _progress.print("[dim]No service is running here: starting one for this command.[/dim]")
    if model is not None and not settings.engine_url:
        served = settings.list_served()
        name = find_name(model, settings, served)
        targets = [model] if name is None else [find_model(target, settings, served) for target in name.targets]
        target, *others = targets
        judge = None if name is None else getattr(name.fields.get("verifier"), "model", None)
        others += [] if judge is None else [find_model(judge, settings, served)]
        settings = load_settings(model=target)
        # A folder's model is served by another name than its path; so is the one in PATH:EFFORT.
        model = model if model in settings.names else model.replace(target, settings.model_name, 1)
        more = [*more, *others]
    if not settings.engine_url:
        settings = settings.with_bundled(more)
    with run_private_service(settings, _progress) as url, Client(url) as client:
        yield client, model


def _is_running(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2.0, **client_options(url)).is_success
    except httpx.TransportError:
        return False


@jobs.command(context_settings=EXTRA)
@expand_options
def submit(
    context: typer.Context,
    problem: Question,
    options: JobOptions,
    service: ServiceOptions,
    webhook: Annotated[
        str | None, typer.Option(help="An https address that receives the result when the job ends.")
    ] = None,
) -> None:
    """Submit a job and return at once. Parameters of the strategy are options too, such as --n 16."""
    spec = options.build_spec(problem, context.args, webhook=webhook)
    with service.connect() as client:
        job = name_models(name_strategy(spec, client, options.model), client, options.model, options.mixed)
        _print(client.submit(job), service.as_json)


@jobs.command("list")
@expand_options
def list_jobs(
    service: ServiceOptions,
    filters: JobFilters,
    limit: PageSize = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last job of the previous page.")] = None,
) -> None:
    """List jobs, newest first."""
    with service.connect() as client:
        page = client.list(limit=limit, after=after, **filters.build_query())
    if service.as_json:
        print_json(page)
        return
    shortened = Column("problem", no_wrap=True, overflow="ellipsis")
    columns = "status", "strategy", "tokens", "seconds", "answer", shortened
    table = Table(Column("job", no_wrap=True), *columns, box=None)
    for job in (Job.model_validate(item) for item in page["data"]):
        answer = Text(plain((job.result.answer if job.result is not None else None) or ""))
        usage = job.usage
        problem = Text(_shorten(job.spec.conversation[-1]["content"] or ""))
        cells = job.id, job.status, job.spec.strategy.name, str(usage.total), f"{usage.seconds:.1f}", answer, problem
        table.add_row(*cells)
    _out.print(table)


@jobs.command()
@expand_options
def show(
    job_id: str,
    service: ServiceOptions,
    picture: Picture = None,
    thought: Annotated[bool, typer.Option("--thought", help="Also print the thought of the chosen solution.")] = False,
) -> None:
    """Show a job with its search tree."""
    with service.connect() as client:
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, picture, service.as_json, show_thought=thought)


@jobs.command()
@expand_options
def watch(job_id: str, service: ServiceOptions) -> None:
    """Draw the search tree of a job live until the job ends."""
    with service.connect() as client:
        watch_tree(client, client.get(job_id), _progress)
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, None, service.as_json)


@jobs.command()
@expand_options
def cancel(job_id: str, service: ServiceOptions) -> None:
    """Cancel a job; the tokens it has used stay on its bill."""
    with service.connect() as client:
        had_ended = client.get(job_id).status in TERMINAL_STATUSES
        job = client.cancel(job_id)
    _progress.print(_describe_cancellation(job, had_ended=had_ended), markup=False, highlight=False, soft_wrap=True)
    _print(job, service.as_json)


def _describe_cancellation(job: Job, *, had_ended: bool) -> str:
    """Return what a cancellation does to a job."""
    if had_ended:
        return f"{job.id} had ended before ({job.status}), and stays as it is"
    if job.status in TERMINAL_STATUSES:
        return f"{job.id} is cancelled, before a worker had it again; the tokens that it used stay on its bill"
    return (
        f"{job.id} is being cancelled: its worker ends it within an engine step and keeps the best solution so far; "
        f"'reasoner jobs show {job.id}' shows it"
    )


@jobs.command()
@expand_options
def retry(job_id: str, service: ServiceOptions) -> None:
    """Run a failed job again; it continues from its journal and pays for nothing twice."""
    with service.connect() as client:
        _print(client.retry(job_id), service.as_json)


@jobs.command()
@expand_options
def delete(job_ids: Annotated[list[str], typer.Argument(metavar="JOB_ID...")], service: ServiceOptions) -> None:
    """Delete jobs that have ended, with their results and trees."""
    with service.connect() as client:
        for job_id in job_ids:
            client.delete(job_id)
            _progress.print(f"deleted {job_id}", markup=False)
    if service.as_json:
        print_json({"deleted": job_ids})


@jobs.command()
@expand_options
def export(
    service: Connection,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Jobs that ended since then: 2d, 12h, 2026-01-31, or seconds since 1970."),
    ] = None,
    status: Annotated[str | None, typer.Option(help="Only jobs that ended with this status.")] = None,
    journal: Annotated[bool, typer.Option("--journal", help="Add all events of each job.")] = False,
) -> None:
    """Print jobs that have ended, one line of JSON each, in the order in which they ended."""
    start = 0.0 if since is None else parse_time(since, "--since")
    with service.connect() as client:
        for line in client.export(since=start, status=status, journal=journal):
            print(line)


def _shorten(problem: str) -> str:
    """Return the beginning of a question on one line."""
    words = " ".join(plain(problem).split())
    return words if len(words) <= MAX_PROBLEM_CHARS else words[: MAX_PROBLEM_CHARS - 1] + "…"


def _show(job: Job, tree: dict[str, Any], picture: Path | None, as_json: bool, *, show_thought: bool = False) -> None:
    if picture is not None:
        title = f"{job.spec.strategy.name}: {job.usage.total} tokens"
        draw_tree(tree["nodes"], tree["best"], title, picture)
    if not as_json:
        print_tree(_out, tree)
    _print(job, as_json, show_thought=show_thought)


def _print(job: Job, as_json: bool, *, show_thought: bool = False) -> None:
    if as_json:
        print(job.model_dump_json(indent=2))
    else:
        print_job(_out, job, show_thought=show_thought)


@expand_options
def list_models(
    service: ServiceOptions,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Instead, let the configured engines of others write a short text and read it again, and say where "
            "log-probabilities differ: such an engine computes something else than it says.",
        ),
    ] = False,
) -> None:
    """List the models of a running service, with the settings of their jobs."""
    if check:
        _check_engines(as_json=service.as_json)
        return
    with service.connect() as client:
        listed = client.models()
    if service.as_json:
        print_json(listed)
        return
    table = Table("model", "context", "parameters", "verifier", "settings", box=None)
    for model in listed["data"]:
        name = model["id"] + (" (default)" if model["id"] == listed["default"] else "")
        defaults = model["defaults"]
        cells = ("-", "scores only") if defaults is None else (_describe_verifier(model), _describe_settings(defaults))
        counts = (f"{count:,}" if count else "unknown" for count in (model["context"], model["parameters"]))
        table.add_row(plain(name), *counts, *map(plain, cells))
    _out.print(table)


def _check_engines(*, as_json: bool) -> None:
    """Print a line for each model of the configured engines; exit status 1 if one does not compute what it says."""
    with end_quietly():
        from workers.config.settings import load_settings
        from workers.engines.check import check_engines
    results = asyncio.run(check_engines(load_settings()))
    if as_json:
        print_json({"data": [asdict(result) for result in results]})
    elif not results:
        _out.print("No engine of others is configured: the service runs its models itself.")
    else:
        for result in results:
            server = f" ({result.server})" if result.server else ""
            _out.print(plain(f"{result.model} at {result.url}{server}: {result.detail}"), markup=False, soft_wrap=True)
    if any(result.verdict in ("differs", "unreachable") for result in results):
        raise typer.Exit(1)


def _describe_verifier(model: dict[str, Any]) -> str:
    verifier = model["defaults"]["verifier"]
    if verifier is None:
        return "none" if model["probe"] is None else "none (has a probe)"
    name: str = verifier.get("model") or verifier["kind"]
    return name


def _describe_settings(defaults: dict[str, Any]) -> str:
    """Return the settings in use, without those that change nothing."""
    sampling = defaults["sampling"]
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0}
    values = {name: value for name, value in sampling.items() if value is not None and value != neutral.get(name)}
    values |= {name: defaults[name] for name in ("system", "prompt", "stop", "chat_template_kwargs") if defaults[name]}
    values["strategy"] = defaults["strategy"]["name"]
    prices = defaults.get("prices")
    if prices is not None:
        rates = "/".join(f"{prices[name]:g}" for name in ("prompt", "cached", "generated") if prices[name] is not None)
        values["prices"] = f"{rates} ({prices['source']})"
    return ", ".join(f"{name} {_describe_value(value)}" for name, value in values.items())


def _describe_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
