"""``reasoner solve`` and ``reasoner jobs``: the REST API on the command line.

With ``--json`` a command prints exactly one JSON document on stdout; progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from api.cli.console import print_json, result_console
from api.cli.durations import parse_time
from api.cli.render import plain, print_job, print_tree, show_progress, watch_tree
from api.roles.private_service import run_private_service
from reasoner.client import Client, ServiceError
from reasoner.jobs.job import Job
from reasoner.jobs.spec import DEFAULT_STRATEGY
from reasoner.strategies.registry import STRATEGIES
from reasoner.tree_picture import draw_tree
from workers.config.settings import Settings, load_settings

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

Url = Annotated[
    str | None,
    typer.Option(
        envvar="REASONER_URL", help="Address of a running service; default: the configured port on this machine."
    ),
]
Key = Annotated[str | None, typer.Option(envvar="REASONER_API_KEY", help="API key, if the service needs one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Question = Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')]
Strategy = Annotated[str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Budget: generated and verifier tokens.")]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Budget: seconds of work.")]
Flops = Annotated[float | None, typer.Option(min=1, help="Budget: FLOPs, two per weight and computed token.")]
Cost = Annotated[float | None, typer.Option(min=0, help="Budget: money, by the prices of the service.")]
Effort = Annotated[
    str | None, typer.Option(help="Budget by name: minimal, low, medium, high, or one that the service defines.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same search.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Same seed, same tree, whatever the timing of the branches.")
]
Model = Annotated[
    str | None,
    typer.Option(help="A served model; without a running service, a bundled model or a model folder."),
]
System = Annotated[str | None, typer.Option(help="System message before the question.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=10, help="Sampling temperature.")]


def _check_picture(path: Path | None) -> Path | None:
    """Raise ``typer.BadParameter`` for a file that cannot be written, before the search begins."""
    if path is not None and (path.suffix.lower() != ".png" or path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path}: give a file that ends in .png, in a folder that exists")
    return path


Picture = Annotated[Path | None, typer.Option(callback=_check_picture, help="Draw the search tree into this PNG file.")]
Answer = Annotated[
    str | None, typer.Option(help="How answers are compared: math, text, choice or code; or the field as JSON.")
]
Verifier = Annotated[
    str | None, typer.Option(help='Verifier: its kind, or the field as JSON: \'{"kind": "numeric", "expected": 4}\'.')
]

MAX_PROBLEM_CHARS = 48
"""Characters of a question that the list of jobs shows."""

jobs = typer.Typer(no_args_is_help=True)
_progress = Console(stderr=True)
_out = result_console()


def solve(
    context: typer.Context,
    problem: Question,
    strategy: Strategy = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    flops: Flops = None,
    cost: Cost = None,
    effort: Effort = None,
    seed: Seed = None,
    deterministic: Deterministic = False,
    model: Model = None,
    system: System = None,
    temperature: Temperature = None,
    answer: Answer = None,
    verifier: Verifier = None,
    picture: Picture = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Answer one question. Parameters of the strategy are options too, such as --n 16 or --expansions 4.

    Uses the service at --url or on the configured port; if none runs there, starts one for this question. Ctrl-C
    cancels the job.
    """
    budget = _build_budget(tokens, seconds, flops, cost, effort)
    spec = _build_spec(
        problem, system, strategy, context.args, budget, seed, temperature, answer, verifier, deterministic
    )
    settings = load_settings()
    with _open_service(settings, url, key, model) as (client, served):
        job = client.submit(name_strategy(spec, client) | ({} if served is None else {"model": served}))
        try:
            show_progress(client, job, _progress)
        except KeyboardInterrupt:
            _cancel(client, job.id)
            raise
        job = client.get(job.id)
        tree = client.tree(job.id)
    _show(job, tree, picture, as_json)
    if job.status != "completed":
        raise typer.Exit(1)


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except ServiceError as error:  # a private service may have been stopped by the same Ctrl-C
        _progress.print(f"{job_id} was not cancelled: {error}", markup=False)
    else:
        _progress.print(f"{job_id} is cancelled", markup=False)


@jobs.command(context_settings=EXTRA)
def submit(
    context: typer.Context,
    problem: Question,
    strategy: Strategy = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    flops: Flops = None,
    cost: Cost = None,
    effort: Effort = None,
    seed: Seed = None,
    deterministic: Deterministic = False,
    model: Model = None,
    system: System = None,
    temperature: Temperature = None,
    answer: Answer = None,
    verifier: Verifier = None,
    webhook: Annotated[
        str | None, typer.Option(help="An https address that receives the result when the job ends.")
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and return at once. Parameters of the strategy are options too, such as --n 16."""
    budget = _build_budget(tokens, seconds, flops, cost, effort)
    spec = _build_spec(
        problem, system, strategy, context.args, budget, seed, temperature, answer, verifier, deterministic
    )
    if model is not None:
        spec["model"] = model
    if webhook is not None:
        spec["webhook"] = webhook
    with connect(url, key) as client:
        _print(client.submit(name_strategy(spec, client)), as_json)


@jobs.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last job of the previous page.")] = None,
    status: Annotated[str | None, typer.Option(help="Only jobs with this status.")] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with connect(url, key) as client:
        page = client.list(limit=limit, after=after, status=status)
    if as_json:
        print_json(page)
        return
    shortened = Column("problem", no_wrap=True, overflow="ellipsis")
    columns = "status", "strategy", "tokens", "seconds", "answer", shortened
    table = Table(Column("job", no_wrap=True), *columns, box=None)
    for job in (Job.model_validate(item) for item in page["data"]):
        answer = Text(plain((job.result.answer if job.result is not None else None) or ""))
        usage = job.usage
        problem = Text(_shorten(job.spec.to_messages()[-1]["content"]))
        cells = job.id, job.status, job.spec.strategy.name, str(usage.total), f"{usage.seconds:.1f}", answer, problem
        table.add_row(*cells)
    _out.print(table)


@jobs.command()
def show(job_id: str, picture: Picture = None, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Show a job with its search tree."""
    with connect(url, key) as client:
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, picture, as_json)


@jobs.command()
def watch(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Draw the search tree of a job live until the job ends."""
    with connect(url, key) as client:
        watch_tree(client, client.get(job_id), _progress)
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, None, as_json)


@jobs.command()
def cancel(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Cancel a job; the tokens it has used stay on its bill."""
    with connect(url, key) as client:
        _print(client.cancel(job_id), as_json)


@jobs.command()
def retry(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Run a failed job again; it continues from its journal and pays for nothing twice."""
    with connect(url, key) as client:
        _print(client.retry(job_id), as_json)


@jobs.command()
def delete(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB_ID...")],
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Delete jobs that have ended, with their results and trees."""
    with connect(url, key) as client:
        for job_id in job_ids:
            client.delete(job_id)
            _progress.print(f"deleted {job_id}", markup=False)
    if as_json:
        print_json({"deleted": job_ids})


@jobs.command()
def export(
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Jobs that ended since then: 2d, 12h, 2026-01-31, or seconds since 1970."),
    ] = None,
    status: Annotated[str | None, typer.Option(help="Only jobs that ended with this status.")] = None,
    journal: Annotated[bool, typer.Option("--journal", help="Add all events of each job.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Print jobs that have ended, one line of JSON each, in the order in which they ended."""
    start = 0.0 if since is None else parse_time(since, "--since")
    with connect(url, key) as client:
        for line in client.export(since=start, status=status, journal=journal):
            print(line)


def _shorten(problem: str) -> str:
    """Return the beginning of a question on one line."""
    words = " ".join(plain(problem).split())
    return words if len(words) <= MAX_PROBLEM_CHARS else words[: MAX_PROBLEM_CHARS - 1] + "…"


def _show(job: Job, tree: dict[str, Any], picture: Path | None, as_json: bool) -> None:
    if picture is not None:
        title = f"{job.spec.strategy.name}: {job.usage.total} tokens"
        draw_tree(tree["nodes"], tree["best"], title, picture)
    if not as_json:
        print_tree(_out, tree)
    _print(job, as_json)


def _print(job: Job, as_json: bool) -> None:
    if as_json:
        print(job.model_dump_json(indent=2))
    else:
        print_job(_out, job)


def _build_spec(
    problem: str,
    system: str | None,
    strategy: str | None,
    extra: list[str],
    budget: dict[str, Any],
    seed: int | None,
    temperature: float | None,
    answer: str | None,
    verifier: str | None,
    deterministic: bool,
) -> dict[str, Any]:
    problem = _read_problem(problem)
    spec: dict[str, Any] = {"problem": problem, "budget": budget}
    if system is not None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": problem}]
        spec = {"messages": messages, "budget": budget}
    options = strategy_options(extra)
    if strategy is not None or options:  # otherwise the service chooses it, by the effort if there is one
        spec["strategy"] = ({} if strategy is None else {"name": strategy}) | options
    if temperature is not None:
        spec["sampling"] = {"temperature": temperature}
    optional = {
        "seed": seed,
        "answer": _parse_word_or_json("answer", answer),
        "verifier": _parse_word_or_json("verifier", verifier),
        "deterministic": deterministic or None,
    }
    if isinstance(optional["verifier"], str):
        optional["verifier"] = {"kind": verifier}
    return spec | {name: value for name, value in optional.items() if value is not None}


def _read_problem(problem: str) -> str:
    """Return the question itself, from standard input for "-"."""
    if problem != "-":
        return problem
    try:
        problem = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}", param_hint="PROBLEM") from None
    if not problem:
        raise typer.BadParameter("standard input is empty: write the question to it", param_hint="PROBLEM")
    return problem


def _parse_word_or_json(option: str, text: str | None) -> Any:
    """Return the JSON object that an option contains, or its text. Raises ``typer.BadParameter``."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint=f"--{option}") from None


def _build_budget(
    tokens: int | None, seconds: float | None, flops: float | None, cost: float | None, effort: str | None
) -> dict[str, Any]:
    limits = {"tokens": tokens, "seconds": seconds, "flops": flops, "cost": cost, "effort": effort}
    return {name: value for name, value in limits.items() if value is not None}


def strategy_options(extra: list[str]) -> dict[str, Any]:
    """Return ``--n 16 --max-steps=8`` as parameters, which the service checks. Raises ``typer.BadParameter``."""
    words = [word for argument in extra for word in (argument.split("=", 1) if argument[:2] == "--" else [argument])]
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise typer.BadParameter(f"give parameters of the strategy as --NAME VALUE; not understood: {' '.join(extra)}")
    options: dict[str, Any] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        try:
            options[name.removeprefix("--").replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.removeprefix("--").replace("-", "_")] = value
    return options


def name_strategy(spec: dict[str, Any], client: Client) -> dict[str, Any]:
    """Return the job; if its strategy has parameters and no name, with the name of the default strategy."""
    strategy = spec.get("strategy")
    if strategy is None or "name" in strategy:
        return spec
    name = client.default_strategy() if spec.get("verifier") is None else DEFAULT_STRATEGY
    return spec | {"strategy": {"name": name} | strategy}


def connect(url: str | None, key: str | None) -> Client:
    """Return a client of the service at ``url``, or on the configured port."""
    return Client(url or _configured_url(load_settings()), key)


def _configured_url(settings: Settings) -> str:
    return f"http://{settings.host}:{settings.port}"


@contextlib.contextmanager
def _open_service(
    settings: Settings, url: str | None, key: str | None, model: str | None
) -> Iterator[tuple[Client, str | None]]:
    """Yield a client and the served name of the model.

    The service is the one at ``url``, else the one on the configured port, else a private one for the time of the
    command.
    """
    if url is None and not _is_running(_configured_url(settings)):
        _progress.print("[dim]No service is running here: starting one for this question.[/dim]")
        if model is not None and not settings.engine_url:
            settings = load_settings(model=model)
            model = settings.model_name
        with run_private_service(settings, _progress) as private_url, Client(private_url) as client:
            yield client, model
    else:
        with Client(url or _configured_url(settings), key) as client:
            yield client, model


def _is_running(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2.0).is_success
    except httpx.TransportError:
        return False
