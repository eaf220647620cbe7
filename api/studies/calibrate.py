"""``reasoner calibrate``: measure strategies and write the calibration table of the strategy ``auto``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from api.cli.console import count_progress, exit_on_error, print_json
from api.cli.options import Model, load_with
from api.roles.private_service import run_private_engine
from engine.protocol.types import EngineError
from reasoner.confidence.calibration import Calibration, CalibrationError
from reasoner.evaluation.calibrate.calibrate import calibrate
from reasoner.evaluation.calibrate.trials import get_stage_name, open_suite_to_fit
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier
from workers.config.types import ConfigError
from workers.engines.connect import connect
from workers.processes import shutdown

MIN_PROBLEMS = 20
"""Problems that a suite must have for a fit."""


def calibrate_suite(
    suite: Annotated[
        str,
        typer.Argument(
            help="Suites, separated by commas: countdown, words, arithmetic, .jsonl files (GSM8K's or MATH's shape), "
            "reasoning-gym:TASK."
        ),
    ],
    model: Model = None,
    limit: Annotated[int, typer.Option(min=20, max=5000, help="Problems of each suite, at most.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Problems solved at the same time.")] = 16,
    out: Annotated[Path, typer.Option(help="File of the table; chart and measurements go beside it.")] = Path(
        "calibration.json"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table on stdout as well.")] = False,
) -> None:
    """Fit the table of the strategy auto for the configured models. An interrupted run continues with the same command.

    Bundled suites and reasoning-gym give problems that no evaluation reports on. A file gives the problems it has, so
    evaluate on another file.
    """
    console = Console(stderr=True)
    suites = _open_suites(suite, limit)
    settings = load_with(model=model)
    verifier = settings.default_verifier(settings.model_name)
    if verifier is not None and not isinstance(verifier, PrmVerifier | ProbeVerifier):
        raise ConfigError(
            f"reasoner calibrate needs a process reward model or a probe as the verifier of {settings.model_name!r}, "
            "or none: set REASONER_PRM, or 'verifier' of the model"
        )
    command = " ".join(["reasoner", *sys.argv[1:]])
    with (
        exit_on_error(console, EngineError, CalibrationError),
        run_private_engine(settings, console) as urls,
        count_progress(console) as progress,
    ):
        task = progress.add_task("measuring")

        async def run() -> Calibration:
            engine = connect(settings, urls)
            try:
                return await calibrate(
                    suites,
                    engine,
                    out.with_suffix(".trials.jsonl"),
                    command,
                    seed=seed,
                    concurrency=concurrency,
                    progress=lambda done, total: progress.update(task, completed=done, total=total),
                    model=settings.model_name,
                    verifier=verifier,
                    uses_suite_temperature=settings.is_bundled(settings.model_name),
                    defaults=settings.models,
                )
            finally:
                await engine.close()

        table = shutdown.run(run())
    _write(table, out)
    if as_json:
        print_json(table.model_dump())
    else:
        _print(Console(), table, out)


def _open_suites(names: str, limit: int) -> list[Suite]:
    try:
        suites = [open_suite_to_fit(name, limit) for name in dict.fromkeys(map(str.strip, names.split(","))) if name]
    except SuiteError as error:
        raise typer.BadParameter(str(error), param_hint="SUITE") from None
    if not suites:
        raise typer.BadParameter("name at least one suite", param_hint="SUITE")
    few = [f"{suite.name} has {len(suite.problems)}" for suite in suites if len(suite.problems) < MIN_PROBLEMS]
    if few:
        raise typer.BadParameter(f"{', '.join(few)} problems: a fit needs at least {MIN_PROBLEMS}", param_hint="SUITE")
    return suites


def _write(table: Calibration, out: Path) -> None:
    from reasoner.evaluation.calibrate.chart import draw_calibration

    out.write_text(json.dumps(table.model_dump(), indent=2) + "\n")
    draw_calibration(table, out.with_suffix(".png"))


def _print(console: Console, table: Calibration, out: Path) -> None:
    view = Table("right after the probe", "problems", "then", "solved", "tokens")
    low = 0.0
    for part in table.bins:
        then = ", ".join(get_stage_name(stage) for stage in part.stages) or "stop"
        view.add_row(
            f"{low:g} to {part.below:g}", str(part.problems), then, f"{part.accuracy:.3f}", f"{part.tokens:.0f}"
        )
        low = part.below
    console.print(view)
    _print_families(console, table)
    reliability = table.reliability
    console.print(
        f"probe of {table.probe}; on problems that were not fitted: ECE {reliability.ece:.3f}, "
        f"Brier {reliability.brier:.3f}; written to {out}",
        markup=False,
    )


def _print_families(console: Console, table: Calibration) -> None:
    """Print for each family what auto solves with its own table and with the common one, beside the whole pool."""
    view = Table("family", "stops at", "solved", "common table", "whole pool", "tokens", "of the whole pool")
    for family in table.families:
        own, common = family.check, family.common
        view.add_row(
            family.name,
            f"{family.confidence:g}",
            f"{own.accuracy:.3f}",
            f"{common.accuracy:.3f}{' (behind)' if common.is_behind else ''}",
            f"{own.reference:.3f} ± {own.error:.3f}",
            f"{own.tokens:.0f}",
            f"{own.tokens / max(1.0, own.reference_tokens):.2f}",
        )
    console.print(view)
    if len(table.families) > 1 and table.list_weak_families():
        console.print("A job that names no family gets no table: what is common to all is behind on some. Name it:")
        console.print(f"  --strategy auto:family={table.families[0].name}", markup=False)
