"""A suite as an evaluation uses it, wherever its problems come from: bundled, a file, or reasoning-gym."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.problem import Problem

Rule = Callable[[Problem, str, Equivalence], Awaitable[bool]]
"""Whether an answer, the content of the box, is right."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems, the rule that says whether an answer is right, and how searches treat them."""

    name: str
    problems: Sequence[Problem]
    rule: Rule
    temperature: float
    """At which searches sample, unless the evaluation says otherwise."""
    answer: Literal["math", "text"]
    """How candidates' answers are compared when they vote."""

    async def check(self, problem: Problem, answer: str | None, equal: Equivalence) -> bool:
        """Whether the answer is right; none is not."""
        return answer is not None and await self.rule(problem, answer, equal)


class SuiteError(ValueError):
    """The suite cannot be opened; the message names the place and what would be right."""
