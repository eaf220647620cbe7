"""The rule of suites whose answers are programs: hidden tests in the sandbox, all of which must pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.protocol.types import InvalidRequest
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec, CodeExtract
from reasoner.evaluation.suites.problem import Problem
from reasoner.sandbox.runner import Limits, SandboxRefused, run_tests

PYTHON_ANSWER = AnswerSpec(compare="code", extract=CodeExtract(code="python"))
MAX_CONCURRENT_TESTS = 2
"""Answers that are tested at the same time: their tests have limits of time."""


@dataclass(frozen=True, slots=True)
class CodeTask:
    """A program with its tests, as the sandbox takes them."""

    code: str
    tests: Sequence[str]
    limits: Limits


class CodeRule:
    """Rule that is True for a program that passes every test; each program is tested once."""

    def __init__(self, build: Callable[[Problem, str], CodeTask]) -> None:
        """``build`` makes the task of a problem's answer."""
        self._build = build
        self._known: dict[tuple[str, str], bool] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_TESTS)

    async def __call__(self, problem: Problem, answer: str, equal: Equivalence) -> bool:  # noqa: ARG002
        """Return True if all tests pass. Raises ``SandboxRefused`` if this system has no sandbox."""
        key = (problem.id, answer)
        async with self._slots:
            if key not in self._known:
                task = self._build(problem, answer)
                verdict = await run_tests(task.code, task.tests, task.limits)
                self._known[key] = verdict.share == 1.0
        return self._known[key]


async def require_sandbox() -> None:
    """Raise ``InvalidRequest`` if this system has no sandbox, without which no answer of such a suite is tested."""
    try:
        await run_tests("", ["assert True"], Limits())
    except SandboxRefused as error:
        raise InvalidRequest(f"the suite runs the answers, and this system has no sandbox for them: {error}") from error
