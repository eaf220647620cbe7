"""``python -m benchmarks.kernels``: time every kernel on a GPU and write ``results.json`` and ``table.md``.

``python -m benchmarks.kernels resources`` compiles them instead, on any machine, and writes their registers, spills,
shared memory and occupancy (``benchmarks.kernels.resources``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.kernels import attention, dry_run, linear, norm, recurrent, sampling, step
from benchmarks.kernels.measure import Case, documents, markdown

SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norm.cases,
    "linear": linear.cases,
    "attention": attention.cases,
    "sampling": sampling.cases,
    "recurrent": recurrent.cases,
    "step": step.cases,
}


def main() -> int:
    """Run the suites; return the exit status, 1 without a GPU or if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)} (all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels"), help="folder of the results")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case, whose median counts")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on the CPU, to try the command")
    arguments = parser.parse_args()
    if arguments.suites == ["resources"]:
        return write_resources()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"there is no suite {min(unknown)!r}; there are {', '.join(SUITES)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device, on which these kernels are timed", file=sys.stderr)
        return 1
    suites = dry_run.SUITES if arguments.dry_run else SUITES
    cases = (case for name in arguments.suites or suites for case in suites[name]())
    arguments.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), dry_run.emulated_gpu() if arguments.dry_run else nullcontext():
        for result in documents(cases, rounds=arguments.rounds, progress=lambda name: print(name, file=sys.stderr)):
            (arguments.out / "results.json").write_text(json.dumps(result, indent=1, ensure_ascii=False), "utf-8")
            (arguments.out / "table.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))
    return 1 if result["failed"] else 0


def write_resources() -> int:
    """Write and print the table of the compiled kernels' resources; return the exit status."""
    from benchmarks.kernels import resources  # its tests' modules need Triton's compiler, and choose Triton's cache

    table = resources.markdown(lambda name: print(name, file=sys.stderr))
    resources.TABLE.parent.mkdir(parents=True, exist_ok=True)
    resources.TABLE.write_text(table, encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
