"""``python -m benchmarks.selection``: collect scored samples of suites, and write the table of the gap that is closed.

python -m benchmarks.selection --out benchmarks/results/selection --suite countdown --prm prm --adapter judge=FOLDER
python -m benchmarks.selection --out benchmarks/results/selection --report-only

What is done is kept in a file of each suite in the folder, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from benchmarks.selection.collect import Collection, collect
from benchmarks.selection.report import write_report


def main() -> None:
    """Collect what is missing and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the samples and the table")
    parser.add_argument("--report-only", action="store_true", help="make the table of the samples that there are")
    parser.add_argument("--suite", help="a suite of 'reasoner eval'")
    parser.add_argument("--name", help="name of the suite in the table; default: the suite")
    parser.add_argument("--model", default="policy", help="a bundled model, a folder or a GGUF file (%(default)s)")
    parser.add_argument("--prm", help="a process reward model: a bundled one or a folder")
    parser.add_argument(
        "--probe", nargs="?", const="", help="the model's probe: a folder, or without one that beside its weights"
    )
    parser.add_argument("--adapter", help="NAME=FOLDER of an adapter of the model that was trained to judge")
    parser.add_argument("--graded", action="store_true", help="grades by the model itself, in place")
    parser.add_argument("--tournament", type=int, default=0, help="also a tournament by grades of so many samples")
    parser.add_argument("--problems", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--n", type=int, default=64, help="samples of each problem and seed (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest solution (%(default)s)")
    parser.add_argument("--thinking-tokens", type=int, help="longest thought")
    parser.add_argument("--prompt", help="prompt of a job, such as {problem}; default: the service's")
    parser.add_argument("--temperature", type=float, help="default: the suite's")
    options = parser.parse_args()
    if not options.report_only:
        if options.suite is None:
            parser.error("give --suite, or --report-only")
        verifiers: dict[str, dict[str, Any]] = {
            **({"prm": {"kind": "prm", "model": "prm"}} if options.prm else {}),
            **({} if options.probe is None else {"probe": {"kind": "probe"}}),
            **(
                {"graded": {"kind": "graded"}, "graded, both ways": {"kind": "graded", "repeats": 2}}
                if options.graded
                else {}
            ),
            **(
                {"graded adapter": {"kind": "graded", "model": options.adapter.partition("=")[0]}}
                if options.adapter
                else {}
            ),
        }
        asyncio.run(
            collect(
                Collection(
                    suite=options.suite,
                    name=options.name or options.suite,
                    out=options.out,
                    model=options.model,
                    prm=options.prm,
                    adapter=options.adapter,
                    probe=options.probe or None,
                    verifiers=verifiers,
                    tournament=options.tournament,
                    problems=options.problems,
                    seeds=options.seeds,
                    n=options.n,
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    thinking_tokens=options.thinking_tokens,
                    prompt=options.prompt,
                )
            )
        )
    print(write_report(options.out))


if __name__ == "__main__":
    main()
