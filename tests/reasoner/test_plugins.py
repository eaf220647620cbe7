"""Strategies and verifiers of other packages: what is loaded, what is left out, and what a user is told of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.long import mostly_long
from tests.packages import install, install_guide

STRATEGY = """
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Strategy


class P(Params):
    n: Samples = 8


async def run(search: Search, params: P) -> Choice:
    "Do something."
    return Choice(None)


STRATEGY = Strategy("NAME", P, run)
"""
VERIFIER = """
from typing import Literal

from reasoner.jobs.rule_specs import RuleSpec


class Even(RuleSpec):
    "1 for an even number."
    kind: Literal["NAME"]

    def check(self, answer: str) -> float:
        return 1.0
"""
STRATEGIES, VERIFIERS = "reasoner.strategies", "reasoner.verifiers"
REPORT = """
import json, sys
from api.roles.plugin_report import describe_plugins, describe_unusable
from pydantic import ValidationError
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.request import JobRequest
from reasoner.strategies.registry import describe_strategies
from reasoner.verifiers.registry import describe_verifiers

errors = []
for fields in json.loads(sys.argv[1]):
    try:
        resolve_program_job(JobRequest.model_validate({"problem": "x", "verifier": None} | fields))
    except (ValidationError, JobRefused) as error:
        errors.append(str(error))
    else:
        errors.append(None)
print(json.dumps({
    "strategies": {name: about["package"] for name, about in describe_strategies().items()},
    "verifiers": {kind: about["package"] for kind, about in describe_verifiers().items()},
    "plugins": describe_plugins(),
    "unusable": describe_unusable(),
    "errors": errors,
    "torch": "torch" in sys.modules,
}))
"""


def report(folder: Path, *jobs: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return what a new process knows with the packages of a folder; ``before`` is code that it runs first."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-c", f"{before}\n{REPORT}", json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_packages_of_the_guides_are_used_like_our_own(tmp_path: Path) -> None:
    guides = ROOT / "docs" / "how-to"
    install_guide(tmp_path, guides / "add-a-strategy.md", "strategy")
    install_guide(tmp_path, guides / "add-a-verifier.md", "verifier")
    congruent = {"kind": "congruent", "modulus": 9}
    found = report(
        tmp_path,
        {"strategy": {"name": "shortest", "n": 3}},
        {"strategy": {"name": "shortest", "m": 3}},
        {"strategy": {"name": "best_of_n"}, "verifier": congruent},
        {"strategy": {"name": "best_of_n"}, "verifier": congruent | {"modulus": 0}},
    )
    assert found["strategies"]["shortest"] == "reasoner-shortest 0.1.0"
    assert found["strategies"]["beam"] == found["verifiers"]["prm"] == "reasoner"
    assert found["verifiers"]["congruent"] == "reasoner-congruent 0.1.0"
    assert [line.partition(" of reasoner, ")[2] for line in found["plugins"]] == [
        "shortest of reasoner-shortest 0.1.0",
        "congruent of reasoner-congruent 0.1.0",
    ]
    assert found["unusable"] == []
    assert not found["torch"]
    good, unknown, also_good, bound = found["errors"]
    assert (good, also_good) == (None, None)
    assert "its parameters: n" in unknown
    assert "verifier.congruent.modulus" in bound


@pytest.mark.parametrize("first", ["", "import both", "import reasoner.jobs.spec", "import reasoner.search.search"])
def test_a_module_with_both_is_loaded_whatever_is_imported_first(first: str, tmp_path: Path) -> None:
    source = STRATEGY.replace("NAME", "mine") + VERIFIER.replace("NAME", "even")
    points = {STRATEGIES: {"mine": "both:STRATEGY"}, VERIFIERS: {"even": "both:Even"}}
    install(tmp_path, "acme-both", points, {"both": source})
    found = report(tmp_path, before=first)
    assert (found["strategies"]["mine"], found["verifiers"]["even"]) == ("acme-both 1.0", "acme-both 1.0")


BROKEN = {
    "imports what is missing": ("import no_such_module", "m:STRATEGY", "ModuleNotFoundError"),
    "ends the process": ("import sys; sys.exit(3)", "m:STRATEGY", "SystemExit: 3"),
    "is no Python": ("def (", "m:STRATEGY", "SyntaxError"),
    "lacks the object": ("x = 1", "m:STRATEGY", "AttributeError"),
    "is something else": ("STRATEGY = 3", "m:STRATEGY", "a int, not a Strategy"),
    "has a bad name": (STRATEGY.replace("NAME", "A b"), "m:STRATEGY", "is no name"),
    "has our name": (STRATEGY.replace("NAME", "greedy"), "m:STRATEGY", "'greedy' is Reasoner's own"),
    "is not async": (STRATEGY.replace("NAME", "m").replace("async def", "def"), "m:STRATEGY", "no async function"),
    "has a parameter called name": (
        STRATEGY.replace("NAME", "m").replace("n: Samples", "name: Samples"), "m:STRATEGY", "cannot be called 'name'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", mostly_long(BROKEN, every=3))
def test_a_strategy_that_cannot_be_used_is_named_and_stops_nothing(fault: str, tmp_path: Path) -> None:
    source, value, reason = BROKEN[fault]
    install(tmp_path, "acme-broken", {STRATEGIES: {"m": value}}, {"m": source})
    install(tmp_path, "good", {STRATEGIES: {"fine": "g:STRATEGY"}}, {"g": STRATEGY.replace("NAME", "fine")})
    found = report(tmp_path, {"strategy": {"name": "m"}}, {"strategy": {"name": "fine"}})
    (line,) = found["unusable"]
    assert "strategy 'm' of the package acme-broken 1.0 is left out" in line
    assert reason in line
    assert found["strategies"]["fine"] == "good 1.0"
    assert found["strategies"]["greedy"] == "reasoner"
    error, none = found["errors"]
    assert "unknown strategy 'm'; known are greedy" in error
    assert "acme-broken 1.0" in error
    assert none is None


@pytest.mark.parametrize(
    ("source", "reason"),
    mostly_long(
        [
            (VERIFIER.replace("NAME", "math"), "'math' is Reasoner's own"),
            (VERIFIER.replace('Literal["NAME"]', "str"), "no Literal of one text"),
            (VERIFIER.replace("def check", "def chek").replace("NAME", "even"), "a method 'check'"),
            (VERIFIER.replace("(RuleSpec)", "").replace("NAME", "even"), "no subclass of VerifierSpec"),
            ("raise ValueError('not today')", "ValueError: not today"),
        ],
        every=3,
    ),
)
def test_a_verifier_that_cannot_be_used_is_named_and_stops_nothing(source: str, reason: str, tmp_path: Path) -> None:
    install(tmp_path, "acme-broken", {VERIFIERS: {"even": "m:Even"}}, {"m": source})
    found = report(tmp_path, {"verifier": {"kind": "even"}}, {"verifier": {"kind": "exact", "expected": "1"}})
    (line,) = found["unusable"]
    assert "verifier 'even' of the package acme-broken 1.0 is left out" in line
    assert reason in line
    assert "even" not in found["verifiers"]
    error, none = found["errors"]
    assert "unknown kind of verifier; use one of prm" in error
    assert "acme-broken 1.0" in error
    assert none is None


def test_of_two_packages_with_one_name_neither_counts(tmp_path: Path) -> None:
    for package in ("one", "two"):
        install(tmp_path, package, {STRATEGIES: {"m": f"{package}:STRATEGY"}}, {package: STRATEGY.replace("NAME", "m")})
    found = report(tmp_path)
    assert "m" not in found["strategies"]
    assert len(found["unusable"]) == 2
    assert all("one 1.0 and two 1.0 use the same name" in line for line in found["unusable"])
