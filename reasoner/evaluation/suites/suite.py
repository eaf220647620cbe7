"""The suite of an evaluation: bundled, from a file, or from reasoning-gym."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.problem import Problem

Rule = Callable[[Problem, str, Equivalence], Awaitable[bool]]
"""Check of an answer (the content of the box) that returns True if it is right."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems, the rule that checks answers, and the settings of searches on them."""

    name: str
    problems: Sequence[Problem]
    rule: Rule
    temperature: float
    """Default sampling temperature of searches."""
    answer: AnswerSpec
    """Extraction of answers, and their comparison in votes."""
    runs_code: bool = False
    """True if the rule runs the answers, so that it needs the sandbox."""

    @property
    def answer_spec(self) -> AnswerSpec:
        """Specification of a search's answers. Solved examples show where they belong, so nothing asks for it."""
        shows_examples = any(problem.examples for problem in self.problems)
        return self.answer.model_copy(update={"instruct": self.answer.instruct and not shows_examples})

    async def check(self, problem: Problem, answer: str | None, equal: Equivalence) -> bool:
        """Return True if the answer is right; False for ``None``."""
        return answer is not None and await self.rule(problem, answer, equal)


class SuiteError(ValueError):
    """The suite cannot be opened; the message names the file, the line and a correction."""
