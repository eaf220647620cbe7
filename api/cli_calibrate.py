"""``reasoner calibrate``: measures strategies and writes the table that ``auto`` decides by."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.stack import private_engine
from engine.types import EngineError
from reasoner.calibrate import calibrate
from reasoner.calibration import Calibration, CalibrationError
from reasoner.suites import SUITES
from reasoner.trials import stage_name
from workers.engines import connect
from workers.settings import load_settings


def calibrate_suite(
    suite: Annotated[str, typer.Argument(help="Suites, separated by commas: countdown, words.")],
    limit: Annotated[int, typer.Option(min=20, max=5000, help="Problems of each suite.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems in flight.")] = 16,
    out: Annotated[Path, typer.Option(help="The table; beside it a picture and the measurements.")] = Path(
        "calibration.json"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table on stdout as well.")] = False,
) -> None:
    """Fit the table of ``auto`` for the configured models. Interrupted, it goes on where it was.

    The problems are held-out ones that no evaluation reports on.
    """
    console = Console(stderr=True)
    suites = tuple(dict.fromkeys(name.strip() for name in suite.split(",") if name.strip()))
    unknown = [name for name in suites if name not in SUITES]
    if unknown or not suites:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known are {', '.join(SUITES)}", param_hint="SUITE")
    settings = load_settings()
    command = " ".join(["reasoner", *sys.argv[1:]])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with private_engine(settings, console) as urls, Progress(*columns, console=console) as progress:
            task = progress.add_task("measuring")

            async def run() -> Calibration:
                engine = connect(settings, urls)
                try:
                    return await calibrate(
                        suites,
                        engine,
                        out.with_suffix(".trials.jsonl"),
                        command,
                        limit=limit,
                        seed=seed,
                        concurrency=concurrency,
                        progress=lambda done, total: progress.update(task, completed=done, total=total),
                    )
                finally:
                    await engine.close()

            table = asyncio.run(run())
    except (EngineError, CalibrationError) as error:
        console.print(f"reasoner: {error}", markup=False)
        raise typer.Exit(1) from None
    _write(table, out)
    if as_json:
        print(json.dumps(table.model_dump(), indent=2))
    else:
        _print(Console(), table, out)


def _write(table: Calibration, out: Path) -> None:
    from reasoner.calibration_chart import draw_calibration

    out.write_text(json.dumps(table.model_dump(), indent=2) + "\n")
    draw_calibration(table, out.with_suffix(".png"))


def _print(console: Console, table: Calibration, out: Path) -> None:
    view = Table("right after the probe", "problems", "then", "solved", "tokens")
    low = 0.0
    for part in table.bins:
        then = ", ".join(stage_name(stage) for stage in part.stages) or "stop"
        view.add_row(
            f"{low:g} to {part.below:g}", str(part.problems), then, f"{part.accuracy:.3f}", f"{part.tokens:.0f}"
        )
        low = part.below
    console.print(view)
    held = table.reliability
    console.print(
        f"probe of {table.probe}; on problems that were not fitted: ECE {held.ece:.3f}, Brier {held.brier:.3f}; "
        f"written to {out}",
        markup=False,
    )
