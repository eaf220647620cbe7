"""Rollouts, training and evaluation of a PRM in one command, each through the command line that a user has.

    python -m recipes.prm                                            the bundled policy on Countdown, minutes on a CPU
    python -m recipes.prm --policy MODEL --problems train.jsonl --cases math.json --fit gsm8k.json --device cuda

An interrupted command resumes from where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from recipes.prm import SHIPPED, WORK


def main() -> None:
    """Run rollouts, training and evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=SHIPPED / "policy", help="writes solutions, and is the base")
    parser.add_argument("--problems", default="countdown", help="a suite, or JSONL with question and answer")
    parser.add_argument("--limit", type=int, help="problems; default: 150 of a suite, all of a file")
    parser.add_argument("--solutions", type=int, default=8, help="of each problem")
    parser.add_argument("--completions", type=int, default=8, help="of each step")
    parser.add_argument("--cases", type=Path, help="ProcessBench file to measure on; default: made from the suite")
    parser.add_argument("--fit", type=Path, help="ProcessBench file to fit the threshold on")
    parser.add_argument("--epochs", type=int, help="default: 8 on a suite, 1 on a file")
    parser.add_argument("--rate", type=float, help="default: 1e-3 on a suite, whose model is tiny, 1e-5 on a file")
    parser.add_argument("--labels", choices=("soft", "hard"), default="soft")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    if not options.policy.is_dir():
        parser.error(f"--policy: {options.policy} is no folder")
    suite = None if Path(options.problems).is_file() else options.problems
    if suite is None and options.cases is None:
        parser.error("--cases: name a file in ProcessBench's format to measure on")
    limit = options.limit or (150 if suite else None)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    data, prm = work / f"{options.policy.name}-rollouts.jsonl", work / f"{options.policy.name}-prm"
    device = ["--device", options.device]
    sampled = ["--solutions", str(options.solutions), "--completions", str(options.completions)]
    bounded = [] if limit is None else ["--limit", str(limit)]
    _reasoner("rollouts", options.problems, data, "--model", options.policy, *bounded, *sampled, *device)
    if not prm.exists():
        learned = ["--epochs", str(options.epochs or (8 if suite else 1)), "--labels", options.labels]
        rate = str(options.rate or (1e-3 if suite else 1e-5))
        _reasoner("train", data, prm, "--base", options.policy, *learned, "--rate", rate, *device)
    cases, fit = options.cases, options.fit
    if cases is None:
        cases, fit = work / f"{suite}.jsonl", work / f"{suite}-fit.jsonl"
        if not cases.exists():
            _run("recipes.prm.cases", "--suite", suite, "--out", work)
    fitted = [] if fit is None else ["--fit", fit]
    _reasoner("evaluate", cases, "--prm", prm, *fitted, *device)


def _reasoner(command: str, *arguments: object) -> None:
    _run("api.cli.main", "prm", command, *arguments)


def _run(module: str, *arguments: object) -> None:
    line = [sys.executable, "-m", module, *map(str, arguments)]
    if status := subprocess.run(line, check=False).returncode:
        sys.exit(status)


if __name__ == "__main__":
    main()
