"""Rules as verifiers (``reasoner.jobs.rule_specs``): a finished solution's answer is right or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

from engine.protocol.types import InvalidRequest
from engine.threads.processors import find_processors
from reasoner.answers.json_schema import is_valid_json
from reasoner.answers.plain import parse_number
from reasoner.budget.ledger import Ledger
from reasoner.deadline import run_within
from reasoner.jobs.rule_specs import (
    ExactVerifier,
    JsonSchemaVerifier,
    MathVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
    RuleSpec,
)
from reasoner.plugins import PluginError
from reasoner.regex import find_pattern_error, matches_fully
from reasoner.sandbox.lockdown import check_lockdown
from reasoner.sandbox.runner import Limits, run_tests
from reasoner.search.scoring import NodeScore, NodeScorer
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext

MAX_CONCURRENT_CHECKS = min(4, find_processors().threads)
"""Number of answers of one job that are checked at the same time."""

Check = Callable[[str], Awaitable[float]]
INSTANT = ExactVerifier | NumericVerifier
"""Rules that take no time, so that no deadline applies to them."""


async def open_rule(context: VerifierContext) -> NodeScorer:
    """Raises ``InvalidRequest`` when a sandbox is needed and this worker's system has none, and for a pattern that
    cannot be used: it is compiled here for the first time."""
    rule = context.spec.verifier
    assert isinstance(rule, RuleSpec)
    match rule:
        case PythonVerifier() if not context.allow_unsandboxed_python:
            seconds = context.ledger.seconds_until_cut()
            await run_within(seconds, lambda: check_lockdown("Python tests", "verifier.kind"))
        case RegexVerifier(pattern=pattern):
            if error := await run_within(context.ledger.seconds_until_cut(), lambda: find_pattern_error(pattern)):
                raise InvalidRequest(error, "verifier.pattern")
    return RuleScorer(_create_check(rule, context), None if isinstance(rule, INSTANT) else context.ledger)


class RuleScorer:
    """A ``NodeScorer``: a node that states an answer, once for every different answer.

    An answer whose check the deadline cuts or prevents has no score.
    """

    def __init__(self, check: Check, ledger: Ledger | None) -> None:
        """``ledger`` has the deadline that ends a check; ``None`` for checks that take no time."""
        self._check = check
        self._ledger = ledger
        self._known: dict[str, float] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)

    def scorable(self, node: Node) -> bool:
        return node.answer is not None

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        answers = {node.answer for node in nodes if node.answer is not None}
        await asyncio.gather(*(self._learn(answer) for answer in sorted(answers - self._known.keys())))
        return [NodeScore(node, self._known[node.answer]) for node in nodes if node.answer in self._known]

    async def _learn(self, answer: str) -> None:
        if self._ledger is None:
            self._known[answer] = await self._check(answer)
            return
        async with self._slots:
            if self._ledger.seconds_left() == 0.0:
                return
            score = await run_within(self._ledger.seconds_until_cut(), lambda: self._check(answer))
            if score is not None and self._ledger.seconds_until_cut() != 0.0:
                self._known[answer] = score


def _create_check(rule: RuleSpec, context: VerifierContext) -> Check:
    """Return the rule as a function from an answer to its score."""

    async def check(answer: str) -> float:
        match rule:
            case ExactVerifier():
                return float(answer.strip() == rule.expected.strip())
            case NumericVerifier():
                return float(is_within_tolerance(answer, rule))
            case MathVerifier():
                return float(await context.equivalence.are_same(rule.expected, answer))
            case RegexVerifier():
                return float(await matches_fully(rule.pattern, answer))
            case JsonSchemaVerifier():
                return float(await is_valid_json(answer, rule.json_schema))
            case PythonVerifier():
                return await _score_by_tests(rule, answer, locked=not context.allow_unsandboxed_python)
            case _:
                return await _check_in_thread(rule, answer)

    return check


async def _check_in_thread(rule: RuleSpec, answer: str) -> float:
    """Run the rule's own check in a thread: the job's own renews its lease meanwhile.

    Raises ``PluginError`` if the check fails: that is a fault of its package, and no score.
    """
    try:
        score = float(await asyncio.to_thread(rule.check, answer))
    except Exception as error:
        raise PluginError(f"the check of verifier {rule.kind!r} failed: {type(error).__name__}: {error}") from error
    if not 0.0 <= score <= 1.0:
        raise PluginError(f"the check of verifier {rule.kind!r} returned {score}: a score is from 0 to 1")
    return score


def is_within_tolerance(answer: str, rule: NumericVerifier) -> bool:
    """Compare by exact arithmetic: 0.1 + 0.2 is 0.3; text that is no number is within no tolerance."""
    value = parse_number(answer)
    if value is None:
        return False
    expected = Fraction(str(rule.expected))
    tolerance = max(Fraction(str(rule.absolute)), Fraction(str(rule.relative)) * abs(expected))
    return abs(value - expected) <= tolerance


async def _score_by_tests(rule: PythonVerifier, answer: str, *, locked: bool) -> float:
    verdict = await run_tests(answer, rule.tests, Limits(rule.seconds, rule.memory_mb << 20), locked=locked)
    return verdict.share if rule.share else float(verdict.share == 1.0)
