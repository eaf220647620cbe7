"""``python -m benchmarks.gym``: make some problems of every task of reasoning-gym, and let the task score its answers.

Each task runs in a process of its own, which is ended after some seconds. It needs ``pip install 'reasoner[gym]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import SuiteError

_FORK = multiprocessing.get_context("fork")
"""Processes that have imported the package already."""


def main() -> None:
    """Try all tasks, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=3, help="problems of each task")
    parser.add_argument("--seconds", type=float, default=30.0, help="time in which they have to be made and scored")
    parser.add_argument("--out", type=Path, help="folder for results.json and table.md")
    options = parser.parse_args()
    from reasoning_gym.factory import DATASETS

    rows = [run_task(task, options.problems, options.seconds) for task in sorted(DATASETS)]
    text = write_table(rows, options.problems, options.seconds)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"version": version("reasoning-gym"), "problems": options.problems, "rows": rows}
        (options.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        (options.out / "table.md").write_text(text)


def run_task(task: str, problems: int, seconds: float) -> dict[str, Any]:
    """Return what ``try_task`` finds in a process of its own, or why it did not end."""
    results: multiprocessing.SimpleQueue[dict[str, Any]] = _FORK.SimpleQueue()
    process = _FORK.Process(target=_report_task, args=(task, problems, results))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return {"task": task, "fault": f"takes longer than {seconds:.0f} seconds"}
    if results.empty():
        return {"task": task, "fault": f"its process ended with {process.exitcode}"}
    row = results.get()
    print(row, file=sys.stderr, flush=True)
    return row


def _report_task(task: str, problems: int, results: multiprocessing.SimpleQueue[dict[str, Any]]) -> None:
    results.put(asyncio.run(try_task(task, problems)))


async def try_task(task: str, problems: int) -> dict[str, Any]:
    """Make problems of a task and let it score its own answers."""
    began = time.perf_counter()
    try:
        suite = open_suite(f"reasoning-gym:{task}", limit=problems)
    except SuiteError as error:
        return {"task": task, "fault": str(error)}
    right = [await suite.check(problem, problem.answer, Equivalence()) for problem in suite.problems]
    return {
        "task": task,
        "problems": len(suite.problems),
        "stated": sum(bool(problem.answer) for problem in suite.problems),
        "right": sum(right),
        "seconds": time.perf_counter() - began,
    }


def write_table(rows: Sequence[dict[str, Any]], problems: int, seconds: float) -> str:
    """Return the Markdown text: those that run, in a sentence, and a table of the others."""
    whole = [row for row in rows if "fault" not in row and row["right"] == row["problems"] == problems]
    others = [row for row in rows if row not in whole]
    slowest = sorted(whole, key=lambda row: -row["seconds"])[:3]
    slow = ", ".join(f"`{row['task']}` ({row['seconds']:.1f} s)" for row in slowest)
    lines = [
        "# Tasks of reasoning-gym\n",
        f"{len(whole)} of {len(rows)} tasks make {problems} problems within {seconds:.0f} seconds and score their own "
        f"answers as right; the slowest are {slow}. The others:\n",
        "| task | problems | with an answer | scored as right | |",
        "|---|---:|---:|---:|---|",
    ]
    for row in others:
        counts = " | ".join(str(row.get(key, "")) for key in ("problems", "stated", "right"))
        lines.append(f"| `{row['task']}` | {counts} | {row.get('fault', '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
