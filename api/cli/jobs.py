"""``reasoner solve`` and ``reasoner jobs``: the REST API from a terminal.

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

from api.cli.durations import moment
from api.cli.render import follow, output, plain, print_job, print_tree
from api.cli.render import watch as draw_live
from api.roles.private_service import run_private_service
from reasoner.client import Client, ServiceError
from reasoner.jobs.job import Job
from reasoner.jobs.spec import DEFAULT_STRATEGY
from reasoner.strategies.registry import STRATEGIES
from reasoner.tree_picture import draw_tree
from workers.config.settings import Settings, load_settings

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

Url = Annotated[
    str | None, typer.Option(envvar="REASONER_URL", help="A running service; default: the configured port.")
]
Key = Annotated[str | None, typer.Option(envvar="REASONER_API_KEY", help="API key, where the service asks for one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Question = Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')]
Strategy = Annotated[str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Budget: generated and verifier tokens.")]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Budget: seconds of work.")]
Flops = Annotated[float | None, typer.Option(min=1, help="Budget: FLOPs, two per weight and computed token.")]
Cost = Annotated[float | None, typer.Option(min=0, help="Budget: money, by the prices of the service.")]
Effort = Annotated[str | None, typer.Option(help="Budget by name: minimal, low, medium, high, or the service's own.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same search.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="With the same seed the same tree, however quick each branch is.")
]
Model = Annotated[
    str | None,
    typer.Option(help="A model that the service serves; a service of one's own takes a bundled one or a folder."),
]
System = Annotated[str | None, typer.Option(help="What the model is told before the question.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=10, help="Sampling temperature.")]


def _picture_file(path: Path | None) -> Path | None:
    """Looked at before a search is paid for, not after it."""
    if path is not None and (path.suffix.lower() != ".png" or path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path}: give a file that ends in .png, in a folder that is there")
    return path


Picture = Annotated[Path | None, typer.Option(callback=_picture_file, help="Draw the search tree into this PNG file.")]
Answer = Annotated[
    str | None, typer.Option(help="How answers are compared: math, text, choice or code; or the field as JSON.")
]
Verifier = Annotated[
    str | None, typer.Option(help='Who scores: a kind, or the field as JSON: \'{"kind": "numeric", "expected": 4}\'.')
]

PROBLEM_CHARS = 48
"""Characters of a question that a list of jobs shows."""

jobs = typer.Typer(no_args_is_help=True)
_progress = Console(stderr=True)
_out = output()


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

    Asks the service at --url or on the configured port; when none runs there, starts one for this question alone.
    Ctrl-C cancels the job.
    """
    budget = _budget(tokens, seconds, flops, cost, effort)
    spec = _spec(problem, system, strategy, context.args, budget, seed, temperature, answer, verifier, deterministic)
    settings = load_settings()
    with _service(settings, url, key, model) as (client, served):
        job = client.submit(name_strategy(spec, client) | ({} if served is None else {"model": served}))
        try:
            follow(client, job, _progress)
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
    except ServiceError as error:  # a service for this question alone may have heard Ctrl-C too
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
    webhook: Annotated[str | None, typer.Option(help="An https address that is told how the job ended.")] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and return at once. Parameters of the strategy are options too, such as --n 16."""
    budget = _budget(tokens, seconds, flops, cost, effort)
    spec = _spec(problem, system, strategy, context.args, budget, seed, temperature, answer, verifier, deterministic)
    if model is not None:
        spec["model"] = model
    if webhook is not None:
        spec["webhook"] = webhook
    with client_of(url, key) as client:
        _print(client.submit(name_strategy(spec, client)), as_json)


@jobs.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last job of the previous page.")] = None,
    status: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with client_of(url, key) as client:
        page = client.list(limit=limit, after=after, status=status)
    if as_json:
        print(json.dumps(page, indent=2))
        return
    shortened = Column("problem", no_wrap=True, overflow="ellipsis")
    columns = "status", "strategy", "tokens", "seconds", "answer", shortened
    table = Table(Column("job", no_wrap=True), *columns, box=None)
    for job in (Job.model_validate(item) for item in page["data"]):
        found = job.result.answer if job.result is not None else None
        usage = job.usage
        answer = Text(plain(found or ""))
        problem = Text(_in_short(job.spec.to_messages()[-1]["content"]))
        cells = job.id, job.status, job.spec.strategy.name, str(usage.total), f"{usage.seconds:.1f}", answer, problem
        table.add_row(*cells)
    _out.print(table)


@jobs.command()
def show(job_id: str, picture: Picture = None, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Show a job with its search tree."""
    with client_of(url, key) as client:
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, picture, as_json)


@jobs.command()
def watch(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Watch a job's search tree grow until it ends."""
    with client_of(url, key) as client:
        draw_live(client, client.get(job_id), _progress)
        job, tree = client.get(job_id), client.tree(job_id)
    _show(job, tree, None, as_json)


@jobs.command()
def cancel(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Cancel a job; what it has spent stays on its bill."""
    with client_of(url, key) as client:
        _print(client.cancel(job_id), as_json)


@jobs.command()
def retry(job_id: str, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Run a failed job again; it goes on from its journal and pays for nothing twice."""
    with client_of(url, key) as client:
        _print(client.retry(job_id), as_json)


@jobs.command()
def delete(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB_ID...")],
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Delete jobs that have ended, with their results and trees."""
    with client_of(url, key) as client:
        for job_id in job_ids:
            client.delete(job_id)
            _progress.print(f"deleted {job_id}", markup=False)
    if as_json:
        print(json.dumps({"deleted": job_ids}, indent=2))


@jobs.command()
def export(
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Jobs that ended since then: 2d, 12h, 2026-01-31, or seconds since 1970."),
    ] = None,
    status: Annotated[str | None, typer.Option(help="Only jobs that ended like this.")] = None,
    journal: Annotated[bool, typer.Option("--journal", help="With all events of each job.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Print jobs that have ended, a line of JSON each, in the order of their ends."""
    start = 0.0 if since is None else moment(since, "--since")
    with client_of(url, key) as client:
        for line in client.export(since=start, status=status, journal=journal):
            print(line)


def _in_short(problem: str) -> str:
    """Return the beginning of a question on one line."""
    words = " ".join(plain(problem).split())
    return words if len(words) <= PROBLEM_CHARS else words[: PROBLEM_CHARS - 1] + "…"


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


def _spec(
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
    problem = _read(problem)
    spec: dict[str, Any] = {"problem": problem, "budget": budget}
    if system is not None:
        said = [{"role": "system", "content": system}, {"role": "user", "content": problem}]
        spec = {"messages": said, "budget": budget}
    options = strategy_options(extra)
    if strategy is not None or options:  # else the service chooses, by the effort if there is one
        spec["strategy"] = ({} if strategy is None else {"name": strategy}) | options
    if temperature is not None:
        spec["sampling"] = {"temperature": temperature}
    optional = {
        "seed": seed,
        "answer": _word_or_json("answer", answer),
        "verifier": _word_or_json("verifier", verifier),
        "deterministic": deterministic or None,
    }
    if isinstance(optional["verifier"], str):
        optional["verifier"] = {"kind": verifier}
    return spec | {name: value for name, value in optional.items() if value is not None}


def _read(problem: str) -> str:
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


def _word_or_json(option: str, text: str | None) -> Any:
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=f"--{option}") from None


def _budget(
    tokens: int | None, seconds: float | None, flops: float | None, cost: float | None, effort: str | None
) -> dict[str, Any]:
    limits = {"tokens": tokens, "seconds": seconds, "flops": flops, "cost": cost, "effort": effort}
    return {name: value for name, value in limits.items() if value is not None}


def strategy_options(extra: list[str]) -> dict[str, Any]:
    """``--n 16 --max-steps=8`` as parameters; the service knows which ones a strategy has."""
    words = [word for argument in extra for word in (argument.split("=", 1) if argument[:2] == "--" else [argument])]
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise typer.BadParameter(f"strategy options come as --name value; got {' '.join(extra)}")
    options: dict[str, Any] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        try:
            options[name.removeprefix("--").replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.removeprefix("--").replace("-", "_")] = value
    return options


def name_strategy(spec: dict[str, Any], client: Client) -> dict[str, Any]:
    """Return the job with the name of a strategy of which only parameters are given: that of jobs that say nothing."""
    strategy = spec.get("strategy")
    if strategy is None or "name" in strategy:
        return spec
    name = client.default_strategy() if spec.get("verifier") is None else DEFAULT_STRATEGY
    return spec | {"strategy": {"name": name} | strategy}


def client_of(url: str | None, key: str | None) -> Client:
    return Client(url or _configured_url(load_settings()), key)


def _configured_url(settings: Settings) -> str:
    return f"http://{settings.host}:{settings.port}"


@contextlib.contextmanager
def _service(
    settings: Settings, url: str | None, key: str | None, model: str | None
) -> Iterator[tuple[Client, str | None]]:
    """The named service, else the one on the configured port, else one of our own for as long as it is needed; and what
    it calls the model that is asked for."""
    if url is None and not _answers(_configured_url(settings)):
        _progress.print("[dim]No service is running here: starting one for this question.[/dim]")
        if model is not None and not settings.engine_url:
            settings = load_settings(model=model)
            model = settings.model_name
        with run_private_service(settings, _progress) as own, Client(own) as client:
            yield client, model
    else:
        with Client(url or _configured_url(settings), key) as client:
            yield client, model


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2.0).is_success
    except httpx.TransportError:
        return False
