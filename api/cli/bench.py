"""``reasoner bench``: our speed beside that of others, in one run on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.threads.processors import find_processors
from workers.config.types import ConfigError
from workers.processes.children import StartError

if TYPE_CHECKING:
    from benchmarks.engine.measure import Measured

M = TypeVar("M")

bench = typer.Typer(help="Measure this machine: our speed beside that of others.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine: our speed beside that of others."""


@bench.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="Sizes of random checkpoints, separated by commas.")] = "50M,250M",
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    peer: Annotated[str, typer.Option(help="Peers, separated by commas; default: all that are installed.")] = "",
    weights: Annotated[
        str, typer.Option(help="Of our engine: float32, or int8, beside peers with quantised weights.")
    ] = "float32",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each; medians are shown.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="For every system; default: all cores.")] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python interpreter that has the peers which this one lacks.")
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Instead: speculative decoding beside plain decoding.")
    ] = False,
    head: Annotated[
        str, typer.Option(help="With --speculation: folders of more drafting heads, separated by commas.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and chart.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """The engine beside transformers, openvino-genai and llama-cpp-python: W1 best-of-N, W2 mixed serving, W3 tree
    search, W4 single stream, cache-hit, and step, the gap between a decode step and its matrix products.

    With --speculation drafters beside plain decoding and transformers' assisted generation: on problems (batch-1,
    batch-4, batch-16, batch-64; policy-large), on a large model (250M) and in a tree search (W3; policy-250M: with the
    policy at the cost of a large model).
    """
    console = Console(stderr=True)
    try:
        from benchmarks.engine import report, speculation_report
        from benchmarks.engine import speculation as guessing
        from benchmarks.engine.checkpoint import SIZES
        from benchmarks.engine.measure import CASES, PEERS, WEIGHTS, Listener, Plan, measure
        from benchmarks.engine.process import BenchError
    except ModuleNotFoundError as error:
        _not_installed(error, console)
    threads = threads or find_processors().threads
    if head and not speculation:
        raise typer.BadParameter("it has a meaning with --speculation only", param_hint="--head")
    try:
        if speculation:
            if peer or peer_python or model != ",".join(SIZES) or weights != WEIGHTS[0]:
                message = "--model, --peer, --peer-python and --weights have no meaning with it"
                raise typer.BadParameter(message, param_hint="--speculation")
            heads = tuple(folder for name in head.split(",") if (folder := name.strip()))
            cases = _chosen(case, guessing.CASES, "--case")
            guesses = guessing.SpeculationPlan(cases=cases, heads=heads, rounds=rounds, threads=threads)
            measured = _measure(guessing.measure, Listener, guesses, console)
            document = speculation_report.document(guesses, measured)
        else:
            plan = Plan(
                models=_chosen(model, SIZES, "--model"),
                cases=_chosen(case, CASES, "--case"),
                peers=_chosen(peer, PEERS, "--peer"),
                weights=_chosen(weights, WEIGHTS, "--weights")[0],
                rounds=rounds,
                threads=threads,
                peer_python=None if peer_python is None else str(peer_python),
            )
            measured = _measure(measure, Listener, plan, console)
            document = report.document(plan, measured)
    except BenchError as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        command, page = shlex.join(["reasoner", *sys.argv[1:]]), speculation_report if speculation else report
        (out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        (out / "table.md").write_text(page.markdown(document, command))
        page.draw(document, out / "chart.png")
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print(Console(), report.speed_table(measured.rows), measured)


@bench.command("kernels")
def bench_kernels(
    model: Annotated[str, typer.Option(help="Size of the random checkpoint.")] = "250M",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each; medians are shown.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Default: all cores.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Decoding with quantised weights on the processor, at batch 1 and 16, beside float32.

    On a machine with a GPU, `python -m benchmarks.kernels` times its kernels.
    """
    console = Console(stderr=True)
    try:
        from benchmarks.engine import report
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.kernels.cpu import CpuPlan, document, markdown, measure_cpu
    except ModuleNotFoundError as error:
        _not_installed(error, console)
    plan = CpuPlan(threads=threads or find_processors().threads, rounds=rounds)
    plan = replace(plan, model=_chosen(model, plan.sizes, "--model")[0])
    try:
        measured = _measure(measure_cpu, Listener, plan, console)
    except BenchError as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    told = document(plan, measured)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(told, indent=2) + "\n")
        (out / "table.md").write_text(markdown(told, shlex.join(["reasoner", *sys.argv[1:]])))
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print(Console(), report.speed_table(measured.rows), measured)


@bench.command("search")
def bench_search(
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    model: Annotated[str, typer.Option(help="Size of the random checkpoints.")] = "50M",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each; medians are shown.")] = 5,
    problems: Annotated[int, typer.Option(min=1, max=600, help="Held-out problems of each bundled suite.")] = 40,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="For every system; default: all cores.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and chart.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Search with a verifier: tokens, what it computes for each generated token in beam searches of 16 beams and 8
    steps; W3, a tree search with scoring beside the same one written on transformers.
    """
    console = Console(stderr=True)
    try:
        from benchmarks.engine.checkpoint import SIZES
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.engine.report import speed_table
        from benchmarks.search import measure as searching
        from benchmarks.search import report
    except ModuleNotFoundError as error:
        _not_installed(error, console)
    plan = searching.SearchPlan(
        cases=_chosen(case, searching.CASES, "--case"),
        model=_chosen(model, SIZES, "--model")[0],
        rounds=rounds,
        problems=problems,
        threads=threads or find_processors().threads,
    )
    try:
        measured = _measure(searching.measure, Listener, plan, console)
    except BenchError as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    told = report.document(plan, measured)
    if out is not None:
        _write(out, told, report.markdown)
        report.draw(told, out / "chart.png")
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print(Console(), speed_table(measured.rows), measured)


@bench.command("service")
def bench_service(
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each; medians are shown.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """The service on an engine without a model, beside Celery alone.

    submit: latency; throughput: short jobs in a second, and memory; overhead: a search of some seconds beside the same
    one in-process; load: 500 queued jobs and 200 open streams.
    """
    console = Console(stderr=True)
    try:
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.service import measure as serving
        from benchmarks.service import report
    except ModuleNotFoundError as error:
        _not_installed(error, console)
    plan = serving.ServicePlan(cases=_chosen(case, serving.CASES, "--case"), rounds=rounds)
    try:
        measured = _measure(serving.measure, Listener, plan, console)
    except (BenchError, StartError) as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    told = report.document(plan, measured)
    if out is not None:
        _write(out, told, report.markdown)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print(Console(), [], measured)


@bench.command("chaos")
def bench_chaos(
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="How long disruptions come.")] = 240.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the disruptions and the jobs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """The service while its processes are killed, terminated and frozen at random: jobs lost, ended twice, given up or
    billed wrongly, refusals, and how long each role takes to recover. The exit status is 1 if anything went wrong.
    """
    console = Console(stderr=True)
    try:
        from benchmarks.chaos import measure as disrupting
        from benchmarks.chaos import report
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
    except ModuleNotFoundError as error:
        _not_installed(error, console)
    plan = disrupting.ChaosPlan(seconds=seconds, seed=seed)
    try:
        chaos = _measure(disrupting.measure, Listener, plan, console)
    except (BenchError, StartError, ConfigError) as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    told = report.document(plan, chaos)
    if out is not None:
        _write(out, told, report.markdown)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print_chaos(Console(), told)
    if not chaos.is_good:
        raise typer.Exit(1)


def _print_chaos(console: Console, told: dict[str, Any]) -> None:
    head, *lines = told["table"]
    view = Table(*head, title=f"{len(told['disruptions'])} disruptions, {told['jobs']} jobs")
    for line in lines:
        view.add_row(*line)
    console.print(view)
    view = Table("what must not happen", "count")
    for row in told["rows"]:
        if row["case"] == "jobs":
            view.add_row(row["metric"], f"{row['ours']:g}")
    console.print(view)
    view = Table("refused", "times")
    for kind, count in told["refusals"].items():
        view.add_row(kind, str(count))
    if view.row_count:
        console.print(view)


def _write(out: Path, told: dict[str, Any], markdown: Callable[[dict[str, Any], str], str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(told, indent=2) + "\n")
    (out / "table.md").write_text(markdown(told, shlex.join(["reasoner", *sys.argv[1:]])))


def _not_installed(error: ModuleNotFoundError, console: Console) -> NoReturn:
    if error.name is None or error.name.partition(".")[0] != "benchmarks":
        raise error
    console.print("reasoner: the benchmarks are not installed; run this in a checkout after `pip install -e .`")
    raise typer.Exit(1) from None


def _measure(measure: Callable[..., M], listener: Callable[..., Any], plan: Any, console: Console) -> M:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("checkpoints", total=None, completed=-1)
        measured = measure(
            plan,
            listener(
                total=lambda count: progress.update(task, total=count),
                step=lambda what: progress.update(task, advance=1, description=what),
                say=lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
            ),
        )
        progress.update(task, advance=1, description="done")
        return measured


def _chosen(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}", param_hint=option)
    return names


def _print(console: Console, speeds: list[list[str]], measured: Measured) -> None:
    if len(speeds) > 1:
        view = Table(*speeds[0], title="generated tokens per second (how many times as fast we are)")
        for line in speeds[1:]:
            view.add_row(*line)
        console.print(view)
    view = Table("case", "metric", "unit", "ours", "beside", "its value", "ratio")
    for row in measured.rows:
        if row.unit != "tokens/s":
            values = _shown(row.ours), row.peer, _shown(row.peer_value), f"{row.ratio:.2f}"
            view.add_row(row.case, row.metric, row.unit, *values)
    if view.row_count:
        console.print(view)


def _shown(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
