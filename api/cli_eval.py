"""``reasoner eval``: a suite, several strategies, accuracy against compute as a table, JSON and a picture."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.stack import private_engine
from engine.client import HttpEngine
from engine.types import EngineError
from reasoner.evaluation import Plan, Run, evaluate
from reasoner.statistics import Comparison, Row, comparisons, rows
from reasoner.strategies import STRATEGIES
from reasoner.suites import Problem, family, load
from workers.settings import load_settings


def evaluate_suite(
    suite: Annotated[str, typer.Argument(help="countdown or words.")],
    strategy: Annotated[str, typer.Option(help="Strategies, separated by commas.")] = ",".join(STRATEGIES),
    n: Annotated[str, typer.Option("--n", help="Numbers of samples, separated by commas.")] = "1,4,16,64",
    limit: Annotated[int, typer.Option(min=1, max=5000, help="Problems.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, max=10, help="Default: the suite's own.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems in flight.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and chart.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Measure strategies on held-out problems: accuracy, tokens (verifier included), 95 % intervals, pass@N."""
    console = Console(stderr=True)
    strategies, counts = _strategies(strategy), _counts(n)  # before the problems are made, which takes seconds
    try:
        problems = load(suite, limit=limit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SUITE") from None
    heat: float = family(suite).TEMPERATURE if temperature is None else temperature
    plan = Plan(strategies, counts, seed, heat, concurrency)
    settings = load_settings()
    try:
        with private_engine(settings, console) as url:
            engine = HttpEngine(url, tokenizer=settings.engine_tokenizer)
            runs = asyncio.run(_measure(problems, plan, engine, console))
    except EngineError as error:
        console.print(f"reasoner: {error}", markup=False)
        raise typer.Exit(1) from None
    table, claims = rows(runs), [claim for count in plan.ns for claim in comparisons(runs, count)]
    document = {
        "suite": suite,
        "problems": len(problems),
        "rows": [asdict(row) for row in table],
        "comparisons": [asdict(claim) for claim in claims],
        "settings": {"seed": seed, "temperature": heat, "model": settings.model, "prm": settings.prm},
    }
    if out is not None:
        _write(out, document, table, claims, suite, len(problems))
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print(Console(), table, claims)


async def _measure(problems: Sequence[Problem], plan: Plan, engine: HttpEngine, console: Console) -> list[Run]:
    stages = plan.stages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting", total=len(problems) * len(stages))
            return await evaluate(
                problems, plan, engine, lambda stage, _: progress.update(task, advance=1, description=stage)
            )
    finally:
        await engine.close()


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        raise typer.BadParameter(
            f"unknown: {', '.join(unknown)}; known are {', '.join(STRATEGIES)}", param_hint="--strategy"
        )
    return names


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(item) for item in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > 256:
        raise typer.BadParameter(f"{text!r}: numbers from 1 to 256, separated by commas", param_hint="--n")
    return counts


def _write(
    out: Path, document: dict[str, Any], table: Sequence[Row], claims: Sequence[Comparison], suite: str, count: int
) -> None:
    from reasoner.chart import draw

    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = [
        "| strategy | N | accuracy | 95 % interval | tokens | of them verifier | seconds |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.strategy} | {row.n} | {row.accuracy:.3f} | {row.low:.3f} – {row.high:.3f} "
        f"| {row.tokens + row.verifier_tokens:.0f} | {row.verifier_tokens:.0f} | {row.seconds:.2f} |"
        for row in table
    ]
    lines += ["", "| comparison on the same problems | difference | 95 % interval |", "|---|---:|---|"]
    lines += [f"| {item.name} | {item.difference:+.3f} | {item.low:+.3f} – {item.high:+.3f} |" for item in claims]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    draw(table, f"{suite}: {count} held-out problems", out / "chart.png")


def _print(console: Console, table: Sequence[Row], claims: Sequence[Comparison]) -> None:
    view = Table("strategy", "N", "accuracy", "95 % interval", "tokens", "verifier", "seconds")
    for row in table:
        view.add_row(
            row.strategy,
            str(row.n),
            f"{row.accuracy:.3f}",
            f"{row.low:.3f} – {row.high:.3f}",
            f"{row.tokens + row.verifier_tokens:.0f}",
            f"{row.verifier_tokens:.0f}",
            f"{row.seconds:.2f}",
        )
    console.print(view)
    view = Table("comparison on the same problems", "difference", "95 % interval")
    for item in claims:
        view.add_row(item.name, f"{item.difference:+.3f}", f"{item.low:+.3f} – {item.high:+.3f}")
    console.print(view)
