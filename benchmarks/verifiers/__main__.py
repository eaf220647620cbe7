"""Collect the tables of ``make bench-verifiers``, and measure what searches do not: F1 of steps, and position bias.

python -m benchmarks.verifiers --out benchmarks/results/verifiers
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.verifiers.position import measure_position
from benchmarks.verifiers.report import write_table

VOTES = (1, 4, 16)


def main() -> None:
    """Write ``steps.json``, ``position.json`` and ``table.md`` beside the results of the searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder with the results of the searches")
    parser.add_argument("--problems", type=int, default=300, help="in each of the two files of cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run("-m", "recipes.prm.cases", "--suite", "countdown", "--problems", options.problems, "--out", folder)
        found = {"prm": _evaluate(folder)}
        for votes in VOTES:
            label = "1 vote" if votes == 1 else f"{votes} votes"
            found[f"generative, {label}"] = _evaluate(folder, "--generative", "checker", "--votes", votes)
        position = asyncio.run(measure_position(folder / "countdown.jsonl"))
    (options.out / "steps.json").write_text(json.dumps(found, indent=2) + "\n")
    (options.out / "position.json").write_text(json.dumps(position, indent=2) + "\n")
    print(write_table(options.out))


def _evaluate(folder: Path, *more: object) -> dict[str, Any]:
    cases = (folder / "countdown.jsonl", "--fit", folder / "countdown-fit.jsonl")
    result: dict[str, Any] = json.loads(_run("-m", "api.cli.main", "prm", "evaluate", *cases, *more, "--json"))
    return {name: value for name, value in result.items() if name not in ("file", "fitted_on")}


def _run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
