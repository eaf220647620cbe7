"""``reasoner bench``: speed of this installation beside that of others, measured in one run on this machine."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from api.cli.console import count_progress, exit_on_error, print_json
from engine.threads.processors import find_processors
from workers.config.types import ConfigError
from workers.processes.children import StartError

if TYPE_CHECKING:
    from benchmarks.engine.measure import Measured

M = TypeVar("M")

bench = typer.Typer(help="Measure the speed on this machine, beside that of others.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure the speed on this machine, beside that of others."""


@bench.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="Sizes of random checkpoints, separated by commas.")] = "50M,250M",
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    peer: Annotated[str, typer.Option(help="Peers, separated by commas; default: all that are installed.")] = "",
    weights: Annotated[
        str, typer.Option(help="Weights of our engine: float32, or int8 beside peers with quantized weights.")
    ] = "float32",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each measurement; medians are shown.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of each; default: all cores.")] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="Python interpreter with the peers that this one lacks.")
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Compare speculative decoding with plain decoding instead.")
    ] = False,
    head: Annotated[
        str, typer.Option(help="With --speculation: folders of more draft heads, separated by commas.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and chart.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare the engine with transformers, openvino-genai and llama-cpp-python.

    Cases: W1 best-of-N, W2 mixed serving, W3 tree search, W4 single stream, cache-hit, and step, the gap between a
    decode step and its matrix products.

    With --speculation: drafters beside plain decoding and transformers' assisted generation, on problems (batch-1,
    batch-4, batch-16, batch-64; policy-large), on a large model (250M) and in a tree search (W3; policy-250M: the
    policy at the cost of a large model).
    """
    console = Console(stderr=True)
    with _require_benchmarks(console):
        from benchmarks.engine import report, speculation_report
        from benchmarks.engine import speculation as speculation_benchmark
        from benchmarks.engine.checkpoint import SIZES
        from benchmarks.engine.measure import CASES, PEERS, WEIGHTS, Listener, Plan, measure
        from benchmarks.engine.process import BenchError
    threads = threads or find_processors().threads
    if head and not speculation:
        raise typer.BadParameter("it needs --speculation", param_hint="--head")
    if speculation and (peer or peer_python or model != ",".join(SIZES) or weights != WEIGHTS[0]):
        message = "--model, --peer, --peer-python and --weights have no effect with it: leave them out"
        raise typer.BadParameter(message, param_hint="--speculation")
    with exit_on_error(console, BenchError):
        if speculation:
            heads = tuple(folder for name in head.split(",") if (folder := name.strip()))
            cases = _parse_names(case, speculation_benchmark.CASES, "--case")
            draft_plan = speculation_benchmark.SpeculationPlan(cases=cases, heads=heads, rounds=rounds, threads=threads)
            measured = _measure(speculation_benchmark.measure, Listener, draft_plan, console)
            document = speculation_report.document(draft_plan, measured)
        else:
            plan = Plan(
                models=_parse_names(model, SIZES, "--model"),
                cases=_parse_names(case, CASES, "--case"),
                peers=_parse_names(peer, PEERS, "--peer"),
                weights=_parse_names(weights, WEIGHTS, "--weights")[0],
                rounds=rounds,
                threads=threads,
                peer_python=None if peer_python is None else str(peer_python),
            )
            measured = _measure(measure, Listener, plan, console)
            document = report.document(plan, measured)
    if out is not None:
        page = speculation_report if speculation else report
        _write(out, document, page.markdown)
        page.draw(document, out / "chart.png")
    if as_json:
        print_json(document)
    else:
        _print(Console(), report.speed_table(measured.rows), measured)


@bench.command("kernels")
def bench_kernels(
    model: Annotated[str, typer.Option(help="Size of the random checkpoint.")] = "250M",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each measurement; medians are shown.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare decoding with quantized weights and with float32 on the CPU, at batch sizes 1 and 16.

    On a machine with a GPU, `python -m benchmarks.kernels` times its kernels.
    """
    console = Console(stderr=True)
    with _require_benchmarks(console):
        from benchmarks.engine import report
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.kernels.cpu import CpuPlan, document, markdown, measure_cpu
    plan = CpuPlan(threads=threads or find_processors().threads, rounds=rounds)
    plan = replace(plan, model=_parse_names(model, plan.sizes, "--model")[0])
    with exit_on_error(console, BenchError):
        measured = _measure(measure_cpu, Listener, plan, console)
    results = document(plan, measured)
    if out is not None:
        _write(out, results, markdown)
    if as_json:
        print_json(results)
    else:
        _print(Console(), report.speed_table(measured.rows), measured)


@bench.command("search")
def bench_search(
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    model: Annotated[str, typer.Option(help="Size of the random checkpoints.")] = "50M",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each measurement; medians are shown.")] = 5,
    problems: Annotated[int, typer.Option(min=1, max=600, help="Held-out problems of each bundled suite.")] = 40,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of each; default: all cores.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and chart.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Measure search with a verifier.

    Cases: tokens, the verifier tokens computed for each generated token in beam searches of 16 beams and 8 steps; W3, a
    tree search with scoring, beside the same one written on transformers.
    """
    console = Console(stderr=True)
    with _require_benchmarks(console):
        from benchmarks.engine.checkpoint import SIZES
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.engine.report import speed_table
        from benchmarks.search import measure as searching
        from benchmarks.search import report
    plan = searching.SearchPlan(
        cases=_parse_names(case, searching.CASES, "--case"),
        model=_parse_names(model, SIZES, "--model")[0],
        rounds=rounds,
        problems=problems,
        threads=threads or find_processors().threads,
    )
    with exit_on_error(console, BenchError):
        measured = _measure(searching.measure, Listener, plan, console)
    results = report.document(plan, measured)
    if out is not None:
        _write(out, results, report.markdown)
        report.draw(results, out / "chart.png")
    if as_json:
        print_json(results)
    else:
        _print(Console(), speed_table(measured.rows), measured)


@bench.command("service")
def bench_service(
    case: Annotated[str, typer.Option(help="Cases, separated by commas; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each measurement; medians are shown.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Compare the service, on an engine without a model, with Celery alone.

    Cases: submit, the latency; throughput, short jobs a second and memory; overhead, a search of some seconds beside
    the same one in-process; load, 500 queued jobs and 200 open streams.
    """
    console = Console(stderr=True)
    with _require_benchmarks(console):
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
        from benchmarks.service import measure as serving
        from benchmarks.service import report
    plan = serving.ServicePlan(cases=_parse_names(case, serving.CASES, "--case"), rounds=rounds)
    with exit_on_error(console, BenchError, StartError):
        measured = _measure(serving.measure, Listener, plan, console)
    results = report.document(plan, measured)
    if out is not None:
        _write(out, results, report.markdown)
    if as_json:
        print_json(results)
    else:
        _print(Console(), [], measured)


@bench.command("chaos")
def bench_chaos(
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="Duration of the disruptions.")] = 240.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the disruptions and the jobs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Kill, terminate and freeze processes of the service at random while it works.

    Counts jobs that were lost, ended twice, failed without reason or were billed wrongly, and refusals; measures how
    long each role takes to recover. The exit status is 1 if anything went wrong.
    """
    console = Console(stderr=True)
    with _require_benchmarks(console):
        from benchmarks.chaos import measure as disrupting
        from benchmarks.chaos import report
        from benchmarks.engine.measure import Listener
        from benchmarks.engine.process import BenchError
    plan = disrupting.ChaosPlan(seconds=seconds, seed=seed)
    with exit_on_error(console, BenchError, StartError, ConfigError):
        chaos = _measure(disrupting.measure, Listener, plan, console)
    results = report.document(plan, chaos)
    if out is not None:
        _write(out, results, report.markdown)
    if as_json:
        print_json(results)
    else:
        _print_chaos(Console(), results)
    if not chaos.is_good:
        raise typer.Exit(1)


def _print_chaos(console: Console, results: dict[str, Any]) -> None:
    head, *lines = results["table"]
    view = Table(*head, title=f"{len(results['disruptions'])} disruptions, {results['jobs']} jobs")
    for line in lines:
        view.add_row(*line)
    console.print(view)
    view = Table("what must not happen", "count")
    for row in results["rows"]:
        if row["case"] == "jobs":
            view.add_row(row["metric"], f"{row['ours']:g}")
    console.print(view)
    view = Table("refused", "times")
    for kind, count in results["refusals"].items():
        view.add_row(kind, str(count))
    if view.row_count:
        console.print(view)


def _write(out: Path, results: dict[str, Any], markdown: Callable[[dict[str, Any], str], str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / "table.md").write_text(markdown(results, shlex.join(["reasoner", *sys.argv[1:]])))


@contextlib.contextmanager
def _require_benchmarks(console: Console) -> Iterator[None]:
    """End the command if an import fails because this installation is without the benchmarks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        console.print("reasoner: the benchmarks are not installed: run this in a checkout after `pip install -e .`")
        raise typer.Exit(1) from None


def _measure(measure: Callable[..., M], listener: Callable[..., Any], plan: Any, console: Console) -> M:
    with count_progress(console) as progress:
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


def _parse_names(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas, all of them for an empty one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; known are {', '.join(known)}", param_hint=option)
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
            values = _format(row.ours), row.peer, _format(row.peer_value), f"{row.ratio:.2f}"
            view.add_row(row.case, row.metric, row.unit, *values)
    if view.row_count:
        console.print(view)


def _format(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
