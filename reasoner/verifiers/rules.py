"""Rules as verifiers: a finished solution's answer is right or not. What may be asked for: ``reasoner.rule_specs``."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

from engine.types import InvalidRequest
from reasoner.answers import canonical
from reasoner.child import Child
from reasoner.patterns import matches
from reasoner.rule_specs import (
    ExactVerifier,
    JsonSchemaVerifier,
    MathVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
    Rule,
)
from reasoner.sandbox.run import Limits, SandboxRefused, run_tests
from reasoner.scoring import NodeScorer, Scored
from reasoner.tree import Node
from reasoner.verifiers.base import Surroundings

SCHEMA_PATIENCE = 5.0
"""Seconds of processor time for one answer; a schema whose patterns backtrack for longer is not met."""
AT_ONCE = min(4, os.cpu_count() or 1)
"""Answers of one job that are tested at the same time."""
_NUMBER = re.compile(
    r"(?:[A-Za-z]\w{0,20}=)?[$€£]?([+-]?)(\d+(?:\.\d*)?|\.\d+)"
    r"(?:(?:[eE]|(?:\\times|\\cdot|\*|×)10\^\{?)([+-]?\d{1,3})\}?)?(/\d+)?(?![\d.^/])"
)
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{?([+-]?\d+)\}?\{?(\d+)\}?")

Check = Callable[[str], Awaitable[float]]


async def open_rule(around: Surroundings) -> NodeScorer:
    """Raises ``InvalidRequest`` when a sandbox is needed and this worker's system has none."""
    rule = around.spec.verifier
    assert isinstance(rule, Rule)
    if isinstance(rule, PythonVerifier) and not around.unlocked_tests:
        await _probe()
    return RuleScorer(_check(rule, around))


class RuleScorer:
    """A ``NodeScorer``: a node that states an answer, once for every different answer."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._known: dict[str, float] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def scorable(self, node: Node) -> bool:
        """See ``NodeScorer``: without an answer there is nothing to check."""
        return node.answer is not None

    async def score(self, nodes: Sequence[Node]) -> list[Scored]:
        """See ``NodeScorer``. Tokens do not limit it, since it takes none."""
        answers = {node.answer for node in nodes if node.answer is not None}
        await asyncio.gather(*(self._learn(answer) for answer in sorted(answers - self._known.keys())))
        return [Scored(node, self._known[node.answer]) for node in nodes if node.answer is not None]

    async def _learn(self, answer: str) -> None:
        async with self._slots:
            self._known[answer] = await self._check(answer)


def _check(rule: Rule, around: Surroundings) -> Check:
    """The rule as a function from an answer to its score."""

    async def check(answer: str) -> float:
        match rule:
            case ExactVerifier():
                return float(answer.strip() == rule.expected.strip())
            case NumericVerifier():
                return float(near(answer, rule))
            case MathVerifier():
                return float(await around.equivalence.equal(canonical(rule.expected), canonical(answer)))
            case RegexVerifier():
                return float(matches(rule.pattern, answer))
            case JsonSchemaVerifier():
                return float(await _valid(rule, answer))
            case PythonVerifier():
                return await _tested(rule, answer, locked=not around.unlocked_tests)

    return check


def number(answer: str) -> Fraction | None:
    """The number that an answer is, exactly: also as a fraction, in LaTeX, with a power of ten, before a unit."""
    text = canonical(answer)
    plain = _FRACTION.fullmatch(text)
    if plain is not None and int(plain.group(3)):
        return Fraction(int(plain.group(1) + "1") * int(plain.group(2)), int(plain.group(3)))
    found = _NUMBER.match(text) if len(text) <= 1000 else None
    if found is None or re.search(r"\d", text[found.end() :].replace("^2", "").replace("^3", "")):
        return None
    sign, digits, power, bottom = found.groups()
    if bottom is not None and not int(bottom[1:]):
        return None
    return Fraction(f"{sign}{digits}e{power or 0}") / int(bottom[1:] if bottom else 1)


def near(answer: str, rule: NumericVerifier) -> bool:
    """By exact arithmetic: 0.1 + 0.2 is 0.3 here, and nothing that is no number is near anything."""
    value = number(answer)
    if value is None:
        return False
    expected = Fraction(str(rule.expected))
    tolerance = max(Fraction(str(rule.absolute)), Fraction(str(rule.relative)) * abs(expected))
    return abs(value - expected) <= tolerance


async def _valid(rule: JsonSchemaVerifier, answer: str) -> bool:
    child = Child("reasoner.schema_child")
    try:
        return await child.ask({"schema": rule.json_schema, "text": answer}, SCHEMA_PATIENCE) is True
    finally:
        await child.close()


async def _tested(rule: PythonVerifier, answer: str, *, locked: bool) -> float:
    verdict = await run_tests(answer, rule.tests, Limits(rule.seconds, rule.memory_mb << 20), locked=locked)
    return verdict.share if rule.share else float(verdict.share == 1.0)


async def _probe() -> None:
    """Before the first token is spent: whether this system locks processes up."""
    try:
        await run_tests("", ["assert True"], Limits())
    except SandboxRefused as error:
        raise InvalidRequest(
            f"this worker has no sandbox for Python tests: {error}. Where every client is trusted its operator can set "
            "REASONER_UNLOCKED_TESTS=true, which runs them with limits of time and memory alone",
            "verifier.kind",
        ) from error
