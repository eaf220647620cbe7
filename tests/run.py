"""Run every section of the tests, even if one fails, and end with the passed, failed and skipped tests.

``python -m tests.run`` runs the suite, ``python -m tests.run --tools`` the tests of benchmarks and recipes, ``python -m
tests.run --long`` the soak and statistical runs, then the property tests with many examples, and the numerical tests,
each file with one of some seeds that it draws and prints. ``--seed N`` repeats any with that seed.
Tests of running services, which mostly wait, run beside those that compute. Exit status 1 if a test or a section
failed.

``python -m tests.run --failed`` runs once more, alone, the tests that failed in the run before, and names those that
pass now: such a test is flaky, which is a fault of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from tests.seeds import keep

TESTS = Path(__file__).parent
FAILED = TESTS.parent / "build" / "failed-tests.txt"
"""Tests that failed in the last run, one per line: the seed and the node id."""


@dataclass(frozen=True)
class Section:
    """One run of pytest: the tests of ``folders`` selected by ``marks``, with a seed (``tests.seeds``).

    ``niceness`` lowers its priority in favour of sections that run beside it.
    """

    name: str
    marks: str
    folders: Sequence[str] = ()
    options: Sequence[str] = ()
    niceness: int = 0
    seed: int = 0

    @property
    def command(self) -> list[str]:
        places = [str(TESTS / folder) for folder in self.folders or [""]]
        return [sys.executable, "-m", "pytest", "-m", self.marks, f"--seed={self.seed}", *self.options, *places]


# A pytest process imports all that it collects, for some seconds, so folders without selected tests are left out.
WITH_SERVICES = ("chaos", "docs", "e2e")
WITH_TOOLS = ("benchmarks", "deploy", "recipes")
ELSEWHERE = (*WITH_TOOLS, "fuzz", "vllm", "clients")
"""Folders of ``make test-tools``, ``make test-long``, ``make test-vllm`` and ``make test-clients``."""
EVERYWHERE = "not long and not real and not vllm and not clients"
COMPUTING = Section(
    "computing",
    EVERYWHERE,
    options=(
        "-n",
        "2",
        "--dist",
        "worksteal",
        *(f"--ignore={TESTS / folder}" for folder in (*WITH_SERVICES, *ELSEWHERE)),
    ),
    niceness=5,
)
TOOLS = Section("tools", EVERYWHERE, WITH_TOOLS, ("-n", "2", "--dist", "worksteal"))
SERVICES = Section("services", EVERYWHERE, WITH_SERVICES, ("-n", "2", "--dist", "loadfile"))
LONG = Section("long", "long and not vllm and not clients", options=("-n", "2", "--dist", "worksteal"))
PROPERTIES = Section(
    "properties",
    f"hypothesis and {EVERYWHERE}",
    options=("-n", "2", "--dist", "worksteal", "--hypothesis-profile=many", "--timeout=600"),
)
"""The property tests with ten times the examples of a quick run (``tests/conftest.py``)."""
TARGETS = ("make test", "make test-tools", "make test-long", "make test-clients", "make test-real", "make test-vllm")
NUMERICAL = ("kernels", "engine", "prm")
"""Folders of tests of numbers, whose weights and inputs a seed changes."""


def deal_numerical(seeds: Sequence[int]) -> list[Section]:
    """Return the sections of the quick tests of numbers: each file runs with one of the seeds, chosen at random."""
    files = sorted(str(path.relative_to(TESTS)) for name in NUMERICAL for path in (TESTS / name).rglob("test_*.py"))
    random.Random(keep(sum(seeds), "deals alike again")).shuffle(files)
    quick = Section("", COMPUTING.marks, options=("-n", "2", "--dist", "worksteal"))
    return [
        replace(quick, name=f"seed {seed}", seed=seed, folders=files[place :: len(seeds)])
        for place, seed in enumerate(seeds)
    ]


@dataclass
class Outcome:
    """Result of a section.

    ``status`` is pytest's exit status; ``skipped`` counts tests by reason.
    """

    section: Section
    status: int
    seconds: float
    output: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """Node ids of the failed tests."""
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return self.status == 0


def run(section: Section, folder: Path, *, live: bool) -> Outcome:
    """Run pytest for a section; its output is shown immediately if ``live``, else collected."""
    report = folder / f"{section.name}.xml"
    started = time.monotonic()
    process = subprocess.Popen(
        [*section.command, "--junitxml", str(report), "-o", "junit_family=xunit1"],
        cwd=TESTS.parent,
        stdout=None if live else subprocess.PIPE,
        stderr=None if live else subprocess.STDOUT,
        text=True,
    )
    os.setpriority(os.PRIO_PROCESS, process.pid, section.niceness)  # inherited by its later children
    try:
        output, _ = process.communicate()
    finally:
        if process.poll() is None:  # interrupted: pytest ends by the same Ctrl-C
            process.wait()
    outcome = Outcome(section, process.returncode, time.monotonic() - started, output or "")
    if report.exists():
        read_report(report, outcome)
    return outcome


def read_report(report: Path, outcome: Outcome) -> None:
    """Count the tests of a JUnit report."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(node_id(case))
        elif skipped is not None:
            outcome.skipped[skipped.get("message", "")] += 1
        else:
            outcome.passed += 1


def node_id(case: ElementTree.Element) -> str:
    """Return the node id by which pytest runs this test again; a file's path if it could not even be collected."""
    path, module, name = (case.get(key, "") for key in ("file", "classname", "name"))
    classes = module.removeprefix(path.removesuffix(".py").replace("/", ".")).strip(".")
    if not path:
        return name.replace(".", "/") + ".py"
    return "::".join(part for part in (path, *classes.split("."), name) if part)


def record_failures(outcomes: Sequence[Outcome]) -> None:
    """Record the failed tests for ``--failed``; none if a section failed for another reason than its tests."""
    FAILED.parent.mkdir(exist_ok=True)
    by_tests = all(outcome.is_good or outcome.failed for outcome in outcomes)
    failed = [f"{outcome.section.seed} {name}\n" for outcome in outcomes for name in outcome.failed]
    FAILED.write_text("".join(failed) if by_tests else "")


def run_failed_again() -> int:
    """Run the previously failed tests again, alone; return 0 if they pass now."""
    by_seed: dict[str, list[str]] = {}
    for line in FAILED.read_text().splitlines() if FAILED.exists() else []:
        seed, _, name = line.partition(" ")
        by_seed.setdefault(seed, []).append(name)
    if not by_seed:
        print("the run before recorded no test that failed")
        return 1
    status = 0
    for seed, names in by_seed.items():
        command = [sys.executable, "-m", "pytest", f"--seed={seed}", *names]
        status = subprocess.run(command, cwd=TESTS.parent).returncode or status
    if status == 0:
        names = [f"{name} (--seed {seed})" for seed, names in by_seed.items() for name in names]
        print("\nfailed in the whole suite and passed alone, to be mended:", *names, sep="\n  ")
    return status


def summarize(outcomes: Sequence[Outcome], not_run: str) -> str:
    """Return the closing paragraph, whose last line is the total."""
    lines = []
    for outcome in outcomes:
        verdict = "passed" if outcome.is_good else f"FAILED (exit status {outcome.status})"
        again = f"; again: pytest --seed {outcome.section.seed}" if outcome.section.seed else ""
        lines.append(f"{outcome.section.name}: {verdict}, {outcome.passed} tests in {minutes(outcome.seconds)}{again}")
    skipped = sum((outcome.skipped for outcome in outcomes), Counter[str]())
    for reason, count in skipped.most_common():
        lines.append(f"skipped {count}: {reason}")
    lines.append(not_run)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(len(outcome.failed) for outcome in outcomes)
    lines.append(f"{passed} passed, {failed} failed, {skipped.total()} skipped")
    return "\n".join(lines)


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def run_quick(seed: int, folder: Path) -> list[Outcome]:
    """Run the suite: the tests of services beside those that compute."""
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(run, replace(SERVICES, seed=seed), folder, live=False)
        computing = run(replace(COMPUTING, seed=seed), folder, live=True)
        services = beside.result()
    print(f"\n{services.section.name}, run beside it:\n{services.output}", flush=True)
    return [computing, services]


def run_long(drawn: Sequence[int], seed: int, part: str | None, folder: Path) -> list[Outcome]:
    """Run the soak and statistical tests, or a ``part`` of them, and the tests that depend on seeds with drawn ones."""
    print("the numerical tests run with the seeds", *drawn, flush=True)
    parts = [f"--part={part}"] if part else []
    sections = [
        replace(LONG, seed=seed, options=[*LONG.options, *parts]),
        *([replace(PROPERTIES, seed=seed)] if drawn else []),
        *deal_numerical(drawn),
    ]
    return [run(one, folder, live=True) for one in sections]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="run the soak and statistical tests instead of the others")
    parser.add_argument("--tools", action="store_true", help="run the tests of benchmarks and recipes")
    parser.add_argument("--seed", type=int, help="shift all random weights, inputs and prompts (default 0)")
    parser.add_argument("--seeds", type=int, default=4, help="how many seeds --long draws for the numerical tests")
    parser.add_argument("--part", metavar="K/N", help="run the Kth of N parts of the soak and statistical tests")
    parser.add_argument("--failed", action="store_true", help="run once more, alone, what failed in the run before")
    options = parser.parse_args()
    if options.failed:
        return run_failed_again()
    # Without bytecode, hundreds of processes would compile the sources again: a fifth of the start of each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Else the first test that needs a kernel compiles all, beside others within its time limit.
    subprocess.run([sys.executable, "-m", "kernels.cpu.precompile"], cwd=TESTS.parent, check=True)
    seed = options.seed or 0
    with tempfile.TemporaryDirectory() as folder:
        if options.long:
            drawn = [secrets.randbelow(2**31) for _ in range(options.seeds)] if options.seed is None else [seed]
            outcomes = run_long(drawn, seed, options.part, Path(folder))
        elif options.tools:
            outcomes = [run(replace(TOOLS, seed=seed), Path(folder), live=True)]
        else:
            outcomes = run_quick(seed, Path(folder))
    record_failures(outcomes)
    ran = "make test-long" if options.long else "make test-tools" if options.tools else "make test"
    print("\n" + summarize(outcomes, f"not run here: {', '.join(name for name in TARGETS if name != ran)}"))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
