"""``python -m benchmarks.batch``: a shared budget compared with an even split; writes ``results.json`` and
``table.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from api.roles.private_service import run_private_engine
from benchmarks.batch.measure import Plan, Solved, measure
from benchmarks.batch.report import document, markdown
from engine.protocol.types import EngineClient
from workers.config.settings import load_settings
from workers.engines.connect import connect


def main() -> None:
    """Run the plan on the configured engine, or on a private one with the bundled models."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--problems", type=int, default=300, help="of both suites together (300)")
    parser.add_argument(
        "--tokens", default="300,700,1200", help="budgets per problem, separated by commas (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    arguments = parser.parse_args()
    plan = Plan(
        arguments.problems, tuple(int(part) for part in arguments.tokens.split(",")), tuple(range(arguments.seeds))
    )
    console = Console(stderr=True)
    settings = load_settings()
    with run_private_engine(settings, console) as urls:
        found = asyncio.run(_measure(plan, connect(settings, urls), console))
    told = document(plan, found, shlex.join(["python", "-m", "benchmarks.batch", *sys.argv[1:]]))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(told, indent=2) + "\n")
        (arguments.out / "table.md").write_text(markdown(told))
    print(markdown(told))


async def _measure(plan: Plan, engine: EngineClient, console: Console) -> list[Solved]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting", total=plan.runs)
            return await measure(plan, engine, lambda what: progress.update(task, advance=1, description=what))
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
