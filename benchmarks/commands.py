"""``reasoner bench``: speed of this installation beside that of others, measured in one run on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from api.cli.console import count_progress, exit_on_error, print_json
from api.cli.options import AsJson, expand_options
from engine.installation import require_engine
from engine.protocol.types import EngineError
from engine.threads.processors import find_processors
from workers.config.types import ConfigError
from workers.processes.children import StartError

M = TypeVar("M")

_NO_PEER = "none"

Cases = Annotated[str, typer.Option("--case", help="Cases, separated by commas; default: all.")]
Rounds = Annotated[int, typer.Option(min=1, max=100, help="Timed runs of each measurement; medians are shown.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of each system; default: all cores.")]

bench = typer.Typer(help="Measure the speed on this machine, beside that of others.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The places of the results."""

    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, table.md, and chart.png if there is one.")
    ] = None
    as_json: AsJson = False


@bench.command("engine")
@expand_options
def bench_engine(
    output: OutputOptions,
    model: Annotated[
        str, typer.Option(help="Sizes of random checkpoints, separated by commas; or a GGUF file or model folder.")
    ] = "50M,250M",
    case: Cases = "",
    peer: Annotated[
        str,
        typer.Option(
            help="Peers, separated by commas; default: all that are installed. none: measure our engine alone."
        ),
    ] = "",
    weights: Annotated[
        str, typer.Option(help="Weights of our engine: float32; or bfloat16 or int8 beside peers with such weights.")
    ] = "float32",
    rounds: Rounds = 3,
    threads: Threads = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="Python interpreter with the peers that this one lacks.")
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Compare speculative decoding with plain decoding instead.")
    ] = False,
    head: Annotated[
        str, typer.Option(help="With --speculation: folders of more draft heads, separated by commas.")
    ] = "",
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Measure the cost of holding branches to a JSON Schema instead.")
    ] = False,
) -> None:
    """Compare the engine with transformers, openvino-genai and llama-cpp-python.

    A peer that is not installed or fails, at whatever stage, is left out, and the rest goes on.

    Cases: W1 best-of-N, W2 mixed serving, W3 tree search, W4 single stream, cache-hit, and step, the gap between a
    decode step and its matrix products. On a GGUF file or model folder W1 to W4 run, beside vllm also; the memory and
    the time for loading are measured too.

    With --speculation: drafters beside plain decoding and transformers' assisted generation, on problems (batch-1,
    batch-4, batch-16, batch-64; policy-large), on siblings' thoughts (thoughts), on a large model (250M) and in a tree
    search (W3; policy-250M: the policy at the cost of a large model).

    With --constrained: decode steps of 16 branches with and without the masks of a JSON Schema (250M).
    """
    from benchmarks.engine import measure, report, speculation_report
    from benchmarks.engine import speculation as speculation_benchmark
    from benchmarks.engine.checkpoint import DEFAULT_SIZES, SIZES

    threads = threads or find_processors().threads
    interpreter = None if peer_python is None else str(peer_python)
    if constrained:
        if speculation or case or peer or peer_python or head:
            message = "--speculation, --head, --case, --peer and --peer-python have no effect with it: leave them out"
            raise typer.BadParameter(message, param_hint="--constrained")
        _bench_constrained(output, "250M" if model == ",".join(DEFAULT_SIZES) else model, weights, rounds, threads)
        return
    if not speculation:
        if head:
            raise typer.BadParameter("it needs --speculation", param_hint="--head")
        if peer.strip() == _NO_PEER and peer_python is not None:
            raise typer.BadParameter("it has no effect with --peer none: leave it out", param_hint="--peer-python")
        if "/" in model or model.endswith(".gguf") or Path(model).exists():
            if weights != measure.WEIGHTS[0]:
                raise typer.BadParameter("a model has its own weights: leave it out", param_hint="--weights")
            _bench_file(output, Path(model).expanduser(), case, peer, rounds, threads, interpreter)
            return
        plan = measure.Plan(
            models=_parse_names(model, SIZES, "--model"),
            cases=_parse_names(case, measure.CASES, "--case"),
            peers=_parse_peers(peer, measure.PEERS),
            weights=_parse_names(weights, measure.WEIGHTS, "--weights")[0],
            rounds=rounds,
            threads=threads,
            peer_python=interpreter,
        )
        _run(measure.measure, plan, report, output)
        return
    if peer or peer_python or model != ",".join(DEFAULT_SIZES) or weights != measure.WEIGHTS[0]:
        message = "--model, --peer, --peer-python and --weights have no effect with it: leave them out"
        raise typer.BadParameter(message, param_hint="--speculation")
    heads = tuple(folder for name in head.split(",") if (folder := name.strip()))
    cases = _parse_names(case, speculation_benchmark.CASES, "--case")
    draft_plan = speculation_benchmark.SpeculationPlan(cases=cases, heads=heads, rounds=rounds, threads=threads)
    _run(speculation_benchmark.measure, draft_plan, speculation_report, output)


def _bench_file(
    output: OutputOptions, path: Path, case: str, peer: str, rounds: int, threads: int, interpreter: str | None
) -> None:
    from benchmarks.engine.workloads import WORKLOADS
    from benchmarks.gguf import speed

    plan = speed.FilePlan(
        path=path,
        cases=_parse_names(case, WORKLOADS, "--case"),
        peers=_parse_peers(peer, speed.SYSTEMS),
        rounds=rounds,
        threads=threads,
        peer_python=interpreter,
    )
    _run(speed.measure, plan, speed, output, show=_print_systems)


def _bench_constrained(output: OutputOptions, model: str, weights: str, rounds: int, threads: int) -> None:
    from benchmarks.engine import constrained, measure
    from benchmarks.engine.checkpoint import SIZES

    plan = constrained.ConstrainedPlan(
        model=_parse_names(model, SIZES, "--model")[0],
        weights=_parse_names(weights, measure.WEIGHTS, "--weights")[0],
        rounds=rounds,
        threads=threads,
    )
    _run(constrained.measure_constrained, plan, constrained, output)


@bench.command("kernels")
@expand_options
def bench_kernels(
    output: OutputOptions,
    model: Annotated[str, typer.Option(help="Size of the random checkpoint.")] = "250M",
    rounds: Rounds = 5,
    threads: Threads = None,
) -> None:
    """Compare decoding with quantized weights and with float32 on the CPU, at batch sizes 1 and 16.

    On a machine with a GPU, `python -m benchmarks.kernels` times its kernels.
    """
    from benchmarks.kernels import cpu

    plan = cpu.CpuPlan(threads=threads or find_processors().threads, rounds=rounds)
    plan = replace(plan, model=_parse_names(model, plan.sizes, "--model")[0])
    _run(cpu.measure_cpu, plan, cpu, output)


@bench.command("search")
@expand_options
def bench_search(
    output: OutputOptions,
    case: Cases = "",
    model: Annotated[str, typer.Option(help="Size of the random checkpoints.")] = "50M",
    rounds: Rounds = 5,
    problems: Annotated[int, typer.Option(min=1, max=600, help="Held-out problems of each bundled suite.")] = 40,
    threads: Threads = None,
) -> None:
    """Measure search with a verifier.

    Cases: tokens, the verifier tokens computed for each generated token in beam searches of 16 beams and 8 steps; W3, a
    tree search with scoring, beside the same one written on transformers.
    """
    from benchmarks.engine.checkpoint import SIZES
    from benchmarks.search import measure, report

    plan = measure.SearchPlan(
        cases=_parse_names(case, measure.CASES, "--case"),
        model=_parse_names(model, SIZES, "--model")[0],
        rounds=rounds,
        problems=problems,
        threads=threads or find_processors().threads,
    )
    _run(measure.measure, plan, report, output)


@bench.command("service")
@expand_options
def bench_service(
    output: OutputOptions,
    case: Cases = "",
    rounds: Rounds = 5,
    engine: Annotated[
        str | None, typer.Option(help="The URL of a vLLM: compare searches there with bare requests to it.")
    ] = None,
) -> None:
    """Compare the service, on an engine without a model, with Celery alone.

    Cases: submit, the latency; throughput, short jobs a second and memory; overhead, a search of some seconds beside
    the same one in-process; load, 500 queued jobs and 200 open streams; fairness, owners of several weights in one
    queue. With --engine: best of 16, beam, reuse of
    prefixes, and verifier, on the models of the environment.
    """
    from benchmarks.service import measure, on_engine, report

    if engine is not None:
        cases = _parse_names(case, on_engine.CASES, "--case")
        _run(
            on_engine.measure,
            on_engine.EnginePlan(engine=engine.rstrip("/"), cases=cases, rounds=rounds),
            report,
            output,
        )
        return
    plan = measure.ServicePlan(cases=_parse_names(case, measure.CASES, "--case"), rounds=rounds)
    _run(measure.measure, plan, report, output)


@bench.command("interference")
@expand_options
def bench_interference(
    output: OutputOptions,
    window: Annotated[float, typer.Option(min=5, max=86_400, help="Seconds in which the batch is to end.")] = 60.0,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Interactive requests a second.")] = 2.0,
    load: Annotated[
        float, typer.Option(min=0.05, max=2, help="The batch as a fraction of what a window holds without others.")
    ] = 0.6,
    rounds: Rounds = 1,
) -> None:
    """Measure the time to the first token of interactive answers alone, beside a batch, and beside one that yields.

    The models are those of the environment: with [engines.NAME] in reasoner.toml those of a vLLM or SGLang.
    """
    from benchmarks.service import interference, report

    plan = interference.InterferencePlan(window=window, rate=rate, load=load, rounds=rounds)
    _run(interference.measure, plan, report, output)


@bench.command("chaos")
@expand_options
def bench_chaos(
    output: OutputOptions,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="Duration of the disruptions.")] = 240.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the disruptions and the jobs.")] = 0,
) -> None:
    """Kill, terminate and freeze processes of the service at random while it works.

    Counts jobs that were lost, ended twice, failed without reason or were billed wrongly, and refusals; measures how
    long each role takes to recover. The exit status is 1 if anything went wrong.
    """
    from benchmarks.chaos import measure, report

    plan = measure.ChaosPlan(seconds=seconds, seed=seed)
    if not _run(measure.measure, plan, report, output, show=_print_disruptions).is_good:
        raise typer.Exit(1)


def _parse_names(text: str, choices: Iterable[str], option: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas, all of them for an empty one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or tuple(choices)
    unknown = [name for name in names if name not in choices]
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; known are {', '.join(choices)}", param_hint=option)
    return names


def _parse_peers(text: str, choices: Iterable[str]) -> tuple[str, ...]:
    """Return the peers in a list separated by commas, all for an empty one, none for ``none``."""
    names = _parse_names(text, choices if not text.strip(" ,") else (*choices, _NO_PEER), "--peer")
    if _NO_PEER not in names:
        return names
    if len(names) > 1:
        message = f"{_NO_PEER} measures our engine alone: leave it or the other names out"
        raise typer.BadParameter(message, param_hint="--peer")
    return ()


def _run(
    measure: Callable[[Any, Any], M],
    plan: Any,
    report: Any,
    output: OutputOptions,
    show: Callable[[dict[str, Any]], None] | None = None,
) -> M:
    """Measure, write the files that ``report`` makes of the results, print them, and return them."""
    from benchmarks.engine.measure import Listener
    from benchmarks.engine.process import BenchError

    console = Console(stderr=True)
    failures = BenchError, StartError, ConfigError, EngineError
    with exit_on_error(console, *failures), count_progress(console) as progress:
        require_engine("a benchmark")
        task = progress.add_task("checkpoints", total=None, completed=-1)
        listener = Listener(
            total=lambda count: progress.update(task, total=count),
            step=lambda name: progress.update(task, advance=1, description=name),
            say=lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
        measured = measure(plan, listener)
        progress.update(task, completed=progress.tasks[0].total, description="done")  # fewer steps without a peer
    document = report.document(plan, measured)
    if output.out is not None:
        output.out.mkdir(parents=True, exist_ok=True)
        (output.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        (output.out / "table.md").write_text(report.markdown(document, shlex.join(["reasoner", *sys.argv[1:]])))
        if hasattr(report, "draw"):
            report.draw(document, output.out / "chart.png")
    if output.as_json:
        print_json(document)
    else:
        (show or _print_comparisons)(document)
    return measured


def _print_comparisons(document: dict[str, Any]) -> None:
    from benchmarks.engine.measure import Row
    from benchmarks.engine.report import speed_table

    rows = [Row(**row) for row in document["rows"]]
    heading, *speeds = speed_table(rows)
    title = "generated tokens per second" + (" (how many times as fast we are)" if heading[2:] else "")
    _print_table(title, heading, *speeds)
    values = [
        [row.case, row.metric, row.unit, _format(row.ours), row.peer, _format(row.peer_value), f"{row.ratio:.2f}"]
        for row in rows
        if row.unit != "tokens/s" and row.peer is not None and row.peer_value is not None
    ]
    _print_table(None, ["case", "metric", "unit", "ours", "beside", "its value", "ratio"], *values)


def _print_systems(document: dict[str, Any]) -> None:
    from benchmarks.gguf.speed import system_table

    _print_comparisons(document)
    _print_table(None, *system_table(document))


def _print_disruptions(document: dict[str, Any]) -> None:
    _print_table(f"{len(document['disruptions'])} disruptions, {document['jobs']} jobs", *document["table"])
    failures = [[row["metric"], f"{row['ours']:g}"] for row in document["rows"] if row["case"] == "jobs"]
    _print_table(None, ["what must not happen", "count"], *failures)
    refusals = [[kind, str(count)] for kind, count in document["refusals"].items()]
    _print_table(None, ["refused", "times"], *refusals)


def _print_table(title: str | None, headings: list[str], *rows: list[str]) -> None:
    """Print a table, unless it has no rows."""
    if not rows:
        return
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _format(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
