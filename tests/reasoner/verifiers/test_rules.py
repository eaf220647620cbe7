"""Rule verifiers: accepted answers, refused parameters, and their effect on a search."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner import regex
from reasoner.answers import equivalence, json_schema
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.plain import parse_number as number
from reasoner.budget.ledger import Ledger
from reasoner.budget.spec import Budget
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.sandbox import lockdown
from reasoner.sandbox.runner import SandboxRefused, run_tests
from reasoner.tree import Node
from reasoner.verifiers import rules
from reasoner.verifiers.context import VerifierContext
from reasoner.verifiers.registry import open_scorer
from tests.scripted import ANSWER, TEXTS, ScriptedEngine
from tests.specs import build_spec


async def scores(verifier: dict[str, object], answers: Sequence[str | None]) -> list[float | None]:
    """Return the score of each answer; ``None`` if the verifier abstains."""
    spec = build_spec({"problem": "?", "verifier": verifier})
    engine = ScriptedEngine()
    nodes = [Node((i,), None, (), reason="stop", answer=answer) for i, answer in enumerate(answers)]
    async with Equivalence() as equal:
        policy: ModelInfo = (await engine.models())[0]
        scorer = await open_scorer(VerifierContext(spec, engine, {}, policy, "job", Ledger(Budget()), equal))
        found = {item.node: item.score for item in await scorer.score([n for n in nodes if scorer.scorable(n)])}
    return [found.get(node) for node in nodes]


async def test_exact_compares_the_text_itself() -> None:
    verifier = {"kind": "exact", "expected": "Paris "}
    assert await scores(verifier, [" Paris", "paris", "Paris, France", None, ""]) == [1.0, 0.0, 0.0, None, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("-3.50", Fraction(-7, 2)), ("1,234", 1234), ("3/4", Fraction(3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)), ("-\\dfrac{3}{4}", Fraction(-3, 4)), ("1.5e3", 1500),
        ("3 \\times 10^{8}", 300_000_000), ("2\\cdot10^{-2}", Fraction(1, 50)), ("$18", 18), ("18 dollars", 18),
        ("5 \\text{ cm}^2", 5), ("x = 7", 7), ("50\\%", 50), ("\\frac{1}{0}", None), ("1/0", None), ("1,2", None),
        ("2^3", None), ("10^{10^{10}}", None), ("1e99999", None), ("nan", None), ("inf", None), ("", None),
        ("seven", 7), ("seven to eight", None), ("9" * 5000, None), ("3 or 4", None),
    ],
)  # fmt: skip
def test_a_number_is_parsed_exactly_or_not_at_all(text: str, value: object) -> None:
    assert number(text) == value


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 1))
def test_numeric_agrees_with_exact_arithmetic(answer: float, expected: float, absolute: float, relative: float) -> None:
    a, e = Fraction(repr(answer)), Fraction(repr(expected))
    near = abs(a - e) <= max(Fraction(repr(absolute)), Fraction(repr(relative)) * abs(e))
    verifier = {"kind": "numeric", "expected": expected, "absolute": absolute, "relative": relative}
    spec = build_spec({"problem": "?", "verifier": verifier}).verifier
    assert rules.is_within_tolerance(f"{Decimal(repr(answer)):f}", spec) is near  # type: ignore[arg-type]


async def test_numeric_accepts_its_tolerance() -> None:
    verifier: dict[str, object] = {"kind": "numeric", "expected": 0.3}
    assert await scores(verifier, ["0.3", "3/10", "0.30001", "nan", None]) == [1.0, 1.0, 0.0, 0.0, None]
    assert await scores(verifier | {"absolute": 0.01}, ["0.31", "0.29", "0.32"]) == [1.0, 1.0, 0.0]
    assert await scores(verifier | {"expected": -200, "relative": 0.01}, ["-202", "-198", "-203"]) == [1.0, 1.0, 0.0]


async def test_math_accepts_equivalent_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "CPU_SECONDS", 1.0)
    verifier = {"kind": "math", "expected": "\\frac{\\sqrt{2}}{2}"}
    answers = ["\\frac{1}{\\sqrt{2}}", "\\sqrt{1/2}", "0.5", "9^{9^{9^{9}}}", None]
    assert await scores(verifier, answers) == [1.0, 1.0, 0.0, 0.0, None]


async def test_a_pattern_matches_the_whole_answer_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "CPU_SECONDS", 0.1)
    assert await scores({"kind": "regex", "pattern": "a+b?"}, ["aab", "b", "aabc", "xaab"]) == [1.0, 0.0, 0.0, 0.0]
    assert await scores({"kind": "regex", "pattern": "(x+x+)+y"}, ["x" * 5000]) == [0.0]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


async def test_valid_json_satisfies_a_schema() -> None:
    answers = [
        '{"name": "Ada", "age": 36}', '{"name": "ada"}', '{"age": 3}', '{"name": "Ada", "age": -1}', "{'name': 'Ada'}",
        '{"name": "Ada", "x": 1}', "", "[" * 100_000, '{"name": "Ada", "age": NaN}', None,
    ]  # fmt: skip
    assert await scores({"kind": "json_schema", "json_schema": PERSON}, answers) == [1.0] + [0.0] * 8 + [None]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a+)+$"},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "#/$defs/nowhere"},
    ],
)
async def test_an_endless_or_dangling_schema_is_not_satisfied(
    schema: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_schema, "TIMEOUT_SECONDS", 1.0)
    assert await scores({"kind": "json_schema", "json_schema": schema}, ['"' + "a" * 60 + 'b"']) == [0.0]


async def test_python_code_passes_all_tests_or_a_share_of_them() -> None:
    verifier: dict[str, object] = {"kind": "python", "tests": ["assert f(1) == 2", "assert f(2) == 4"]}
    answers = ["def f(x):\n    return 2 * x", "def f(x):\n    return 2", "def f(x)", None]
    assert await scores(verifier, answers) == [1.0, 0.0, 0.0, None]
    assert await scores(verifier | {"share": True}, answers) == [1.0, 0.5, 0.0, None]


async def test_equal_answers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    run = run_tests

    async def counted(code: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(code)
        return await run(code, *args, **kwargs)

    monkeypatch.setattr(rules, "run_tests", counted)
    assert await scores({"kind": "python", "tests": ["assert f"]}, ["f = 1"] * 9 + ["f = 0"]) == [1.0] * 9 + [0.0]
    assert sorted(calls) == ["f = 0", "f = 1"]


SCHEMA = "verifier.json_schema.json_schema"
TEST = "verifier.python.tests.0"
HEAVY = "(?:" + "[ab]?" * 191 + "){9999}"
"""A pattern whose compilation takes seconds and gigabytes."""


def finally_inside(source: str, times: int) -> str:
    for _ in range(times):
        source = "try:\n pass\nfinally:\n" + "".join(f" {line}\n" for line in source.splitlines())
    return source


def way_out_times_finally(count: int) -> str:
    inside = "  return\n" * count + " finally:\n" + "  assert f\n" * count
    return f"def test():\n try:\n{inside}"


@pytest.mark.parametrize(
    "source",
    [
        finally_inside("assert f\n", 2),
        way_out_times_finally(5),
        "for x in f():\n try:\n  if x:\n   break\n finally:\n  assert x\n",
    ],
)
def test_a_test_may_have_finally_blocks(source: str) -> None:
    build_spec({"problem": "?", "verifier": {"kind": "python", "tests": [source]}})


@pytest.mark.parametrize(
    ("verifier", "field", "hint"),
    [
        ({"kind": "exactly"}, "verifier", "use one of prm, judge, outcome, probe, generative, pairwise, graded, exact"),
        ({"kind": "exact"}, "verifier.exact.expected", "required"),
        ({"kind": "exact", "expected": ""}, "verifier.exact.expected", "at least 1"),
        ({"kind": "exact", "expected": "x", "model": "prm"}, "verifier.exact.model", "Extra inputs"),
        ({"kind": "numeric", "expected": "x"}, "verifier.numeric.expected.int", "valid integer"),
        ({"kind": "numeric", "expected": math.nan}, "verifier.numeric.expected.float", "finite"),
        ({"kind": "numeric", "expected": 1, "absolute": -1}, "verifier.numeric.absolute", "greater than or equal to 0"),
        ({"kind": "math", "expected": "x" * 1001}, "verifier.math.expected", "at most 1000"),
        ({"kind": "regex", "pattern": "("}, "verifier.regex.pattern", "not a regular expression"),
        ({"kind": "regex", "pattern": "(?:a{99}){999}"}, "verifier.regex.pattern", "multiply"),
        ({"kind": "regex", "pattern": HEAVY}, "verifier.regex.pattern", "this pattern has 1909809; use smaller counts"),
        ({"kind": "json_schema", "json_schema": {"type": "strin"}}, SCHEMA, "not a JSON schema"),
        ({"kind": "json_schema", "json_schema": {"pattern": HEAVY}}, SCHEMA, "1909809; use smaller counts"),
        ({"kind": "json_schema", "json_schema": {"patternProperties": {HEAVY: {}}}}, SCHEMA, "use smaller counts"),
        ({"kind": "json_schema", "json_schema": {"pattern": "a" * 1001}}, SCHEMA, "at most 1000"),
        ({"kind": "json_schema", "json_schema": {"anyOf": [{}] * 1000}}, SCHEMA, "more than 1000 schemas"),
        ({"kind": "json_schema", "json_schema": {"pattern": "("}}, SCHEMA, "is not a 'regex'"),
        ({"kind": "json_schema", "json_schema": {"$ref": "http://x/y"}}, SCHEMA, "points outside"),
        ({"kind": "json_schema", "json_schema": {"$ref": "file:///etc"}}, SCHEMA, "points outside"),
        ({"kind": "json_schema", "json_schema": {"enum": ["x" * 20_000]}}, SCHEMA, "more than"),
        ({"kind": "json_schema", "json_schema": []}, SCHEMA, "dictionary"),
        ({"kind": "python", "tests": []}, "verifier.python.tests", "at least 1"),
        ({"kind": "python", "tests": ["assert f(1) == 1", "assert f(1 == 1"]}, "verifier.python.tests.1", "not Python"),
        ({"kind": "python", "tests": ["return 1"]}, "verifier.python.tests.0", "not Python"),
        ({"kind": "python", "tests": ["x = 1"]}, "verifier.python.tests.0", "asserts nothing"),
        ({"kind": "python", "tests": ["(" * 9999]}, "verifier.python.tests.0", "not Python"),
        ({"kind": "python", "tests": [finally_inside(finally_inside("assert f\n", 10), 10)]}, TEST, "nested finally"),
        ({"kind": "python", "tests": [way_out_times_finally(400)]}, TEST, "nested finally blocks"),
        ({"kind": "python", "tests": ["assert f"], "seconds": 61}, "verifier.python.seconds", "or equal to 60"),
    ],
)  # fmt: skip
def test_an_invalid_rule_is_refused_by_name(verifier: dict[str, object], field: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build_spec({"problem": "?", "verifier": verifier})
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert hint in found[field], found


def test_a_deep_schema_is_refused_without_recursion() -> None:
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"not": deep}
    with pytest.raises(ValidationError, match=r"nested too deeply|depth exceeded"):
        build_spec({"problem": "?", "verifier": {"kind": "json_schema", "json_schema": deep}})


def test_code_and_json_are_extracted_from_their_blocks_unless_the_job_says_otherwise() -> None:
    python = {"kind": "python", "tests": ["assert f"]}
    spec = build_spec({"problem": "?", "verifier": python})
    assert spec.answer.model_dump() == {"compare": "code", "extract": {"code": "python"}, "instruct": True}
    silent = build_spec({"problem": "?", "verifier": python, "answer": {"instruct": False}})
    assert silent.answer == spec.answer.model_copy(update={"instruct": False})
    assert JobSpec.model_validate_json(spec.model_dump_json()).answer == spec.answer
    assert build_spec({"problem": "?", "verifier": python, "answer": "text"}).answer.compare == "text"


async def solve(
    verifier: dict[str, object], strategy: str, seed: int, **more: object
) -> tuple[JobOutcome, MemoryJournal]:
    body = {"problem": "how?", "seed": seed, "verifier": verifier, "strategy": {"name": strategy, "n": 16}, **more}
    journal = MemoryJournal()
    return await run_job(build_spec(body), ScriptedEngine(order=seed), journal), journal


@pytest.mark.parametrize("seed", range(8))
async def test_best_of_n_ends_at_the_first_solution_that_a_rule_accepts(seed: int) -> None:
    rule = {"kind": "numeric", "expected": 1}
    outcome, journal = await solve(rule, "best_of_n", seed, answer="text")
    everything, _ = await solve({"kind": "numeric", "expected": 7}, "best_of_n", seed, answer="text")
    assert outcome.result.answer == "1"
    assert outcome.result.confidence == 1.0
    assert outcome.usage.verifier_computed == 0
    assert everything.result.confidence == 0.0
    again = MemoryJournal(journal.entries[:-1])
    spec = {
        "problem": "how?",
        "seed": seed,
        "verifier": rule,
        "strategy": {"name": "best_of_n", "n": 16},
        "answer": "text",
    }
    assert (await run_job(build_spec(spec), ScriptedEngine(order=seed + 1), again)).result == outcome.result


async def test_stopping_early_saves_tokens() -> None:
    saved = [
        (await solve({"kind": "numeric", "expected": 7}, "best_of_n", seed))[0].usage.generated
        - (await solve({"kind": "numeric", "expected": 1}, "best_of_n", seed))[0].usage.generated
        for seed in range(8)
    ]
    assert all(tokens >= 0 for tokens in saved)
    assert any(tokens > 0 for tokens in saved)


async def test_a_vote_weighted_by_a_rule_returns_a_right_answer() -> None:
    outcome, _ = await solve({"kind": "exact", "expected": "2"}, "weighted_vote", 3, answer="text")
    assert outcome.result.answer == "2"
    assert outcome.result.confidence == 1.0


async def test_a_replay_reads_the_scores_and_checks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTS, ANSWER, "\n```python\nx = %d\n```\n")
    verifier: dict[str, object] = {"kind": "python", "tests": ["assert x == 1"]}
    outcome, journal = await solve(verifier, "weighted_vote", 4)
    assert outcome.result.answer == "x = 1"
    monkeypatch.setattr(rules, "_score_by_tests", None)
    spec = {"problem": "how?", "seed": 4, "verifier": verifier, "strategy": {"name": "weighted_vote", "n": 16}}
    again = MemoryJournal(journal.entries[:-1])
    assert (await run_job(build_spec(spec), ScriptedEngine(), again)).result == outcome.result


async def test_without_a_sandbox_the_job_fails_before_any_token_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*args: object, **kwargs: object) -> None:
        raise SandboxRefused("there is no filter of system calls for plan9")

    monkeypatch.setattr(lockdown, "run_tests", refused)
    engine = ScriptedEngine()
    spec = build_spec({"problem": "?", "seed": 1, "verifier": {"kind": "python", "tests": ["assert f"]}})
    with pytest.raises(InvalidRequest, match=r"no sandbox for Python tests.*plan9.*REASONER_UNLOCKED_TESTS"):
        await run_job(spec, engine, MemoryJournal())
    assert engine.generated == []


def test_every_rule_survives_storage() -> None:
    for verifier in (
        {"kind": "exact", "expected": "x"},
        {"kind": "numeric", "expected": 1, "relative": 0.1},
        {"kind": "numeric", "expected": 0.5},
        {"kind": "math", "expected": "x^2"},
        {"kind": "regex", "pattern": "a|b"},
        {"kind": "json_schema", "json_schema": PERSON},
        {"kind": "python", "tests": ["assert f"], "share": True},
    ):
        spec = build_spec({"problem": "?", "verifier": verifier})
        assert JobSpec.model_validate(json.loads(json.dumps(spec.model_dump()))).verifier == spec.verifier
