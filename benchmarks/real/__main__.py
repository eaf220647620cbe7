"""``python -m benchmarks.real``: strategies with a public model on reasoning-gym's tasks, and the report.

The commands of the plan run one after the other, each of them visible. Run it again after an interruption: what is done
is kept in the folder of its task.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.real.plan import RealPlan
from benchmarks.real.report import write_report
from benchmarks.real.tasks import TASKS, find_model


def main() -> None:
    """Run the plan and write the report; the first command that fails ends both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the report")
    parser.add_argument("--model", type=Path, help="a GGUF file or model folder; default: the installed SmolLM2")
    parser.add_argument("--problems", type=int, default=50, help="of each task (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each problem (%(default)s)")
    parser.add_argument("--n", default="1,4,16,64", help="numbers of samples (%(default)s)")
    parser.add_argument("--live-n", default="4,16", help="numbers of samples of searches (%(default)s)")
    parser.add_argument("--training", type=int, default=200, help="problems of each task for the probe (%(default)s)")
    parser.add_argument("--task", action="append", help="a suite instead of the chosen ones; repeatable")
    parser.add_argument("--strategy", default="", help="strategies instead of all, separated by commas")
    parser.add_argument("--gsm8k", type=Path, help="also measure on a file of GSM8K's shape")
    parser.add_argument("--report-only", action="store_true", help="make the report of the runs that there are")
    arguments = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.real", *sys.argv[1:]])
    if not arguments.report_only:
        model = (arguments.model or find_model()).absolute()
        plan = RealPlan(
            model=model,
            out=arguments.out,
            problems=arguments.problems,
            seeds=arguments.seeds,
            ns=arguments.n,
            live_ns=arguments.live_n,
            tasks=tuple(arguments.task or TASKS),
            strategies=tuple(filter(None, arguments.strategy.split(","))),
            gsm8k=arguments.gsm8k,
            training=arguments.training,
        )
        _run(plan)
    write_report(arguments.out, command)
    print((arguments.out / "table.md").read_text())


def _run(plan: RealPlan) -> None:
    reasoner = Path(sys.executable).with_name("reasoner")
    steps = plan.steps()
    for number, step in enumerate(steps, 1):
        print(f"{number}/{len(steps)} {step.title}", file=sys.stderr, flush=True)
        finished = subprocess.run(
            [reasoner, *step.arguments], env={**os.environ, **step.environment}, stdout=subprocess.DEVNULL, check=False
        )
        if finished.returncode:
            print(f"stopped: reasoner {shlex.join(step.arguments)}", file=sys.stderr)
            sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
