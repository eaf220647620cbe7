"""The form of a file of problems: by which fields it is recognised, and what its records mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Rule
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

TEMPERATURE = 0.8
"""Usual sampling temperature for competition problems (Beeching et al. 2024, "Scaling test-time compute")."""


async def same_mathematics(problem: Problem, answer: str, equal: Equivalence) -> bool:
    """Return True if the answer is mathematically equal to the problem's answer, as in a vote."""
    return await equal.are_same(answer, problem.answer)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One form in which problems are published."""

    name: str
    """Name before the path of a file whose form is not recognised, as in ``aime:problems.jsonl``."""
    title: str
    marks: tuple[str, ...]
    """Fields that the first record of such a file has, and that of no other form has all of."""
    fields: str
    """The fields in words, for messages."""
    parse: Callable[[Record, str, int], Problem]
    """Function of a record, the problem's id and the seed that returns the problem. Raises ``SuiteError``."""
    id_fields: tuple[str, ...] = ()
    """Fields that may hold the id of a problem, in order of preference."""
    has_ids: bool = False
    """True if a published file always has one of the ``id_fields``; else the line's number is the id without them."""
    rule: Rule = same_mathematics
    answer: AnswerSpec = field(default_factory=AnswerSpec)
    temperature: float = TEMPERATURE
    runs_code: bool = False
    """True if its rule runs the answers, so that it needs the sandbox."""


def make_problem(
    record: Record,
    name: str,
    suite: str,
    *,
    text: str,
    answer: str,
    field: str,
    level: str = "",
    data: dict[str, Any] | None = None,
) -> Problem:
    """Return the problem of a record whose ``field`` has its text. Raises ``SuiteError`` if that is too long."""
    if len(text) > MAX_PROBLEM_CHARS:
        raise record.refuse(field, f"{len(text)} characters; a problem has at most {MAX_PROBLEM_CHARS}")
    return Problem(name, suite, level=level, text=text, answer=answer, data=data or {})
