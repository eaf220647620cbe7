"""The problems of a contest: JSON Lines, CSV or Parquet with an id, a text and perhaps the right answer of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from reasoner.evaluation.suites.files.gsm8k import read_gold
from reasoner.evaluation.suites.files.records import Record, read_records
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

ID_FIELDS = ("id", "ID", "problem_id", "unique_id", "problem_idx")
TEXT_FIELDS = ("problem", "question", "Problem", "prompt")
ANSWER_FIELDS = ("answer", "Answer")
MAX_ID_CHARS = 200


@dataclass(frozen=True, slots=True)
class ContestProblem:
    """A problem; ``answer`` is the right one, ``None`` where it is not told."""

    id: str
    text: str
    answer: str | None = None
    source: Problem | None = None
    """The problem of the suite, if the contest is one: it may have solved examples before the question."""


def read_problems(path: Path) -> list[ContestProblem]:
    """Return the problems of a file, whose ids are the line numbers if it has none.

    Raises ``SuiteError``, which names line and field, for a file that cannot be read, an empty or overlong text, a
    missing or repeated id, and a file without problems.
    """
    problems: list[ContestProblem] = []
    places: dict[str, str] = {}
    for record in read_records(path):
        problem = _read_problem(record)
        if problem.id in places:
            raise record.refuse(
                "id", f"{problem.id!r} is also the id at {places[problem.id]}; each problem has its own"
            )
        places[problem.id] = record.where
        problems.append(problem)
    if not problems:
        raise SuiteError(f"{path}: no problems; each line or row needs a field {' or '.join(map(repr, TEXT_FIELDS))}")
    return problems


def list_problems(suite: Suite) -> list[ContestProblem]:
    """Return the problems of a suite. Raises ``SuiteError`` for one without any."""
    if not suite.problems:
        raise SuiteError(f"{suite.name}: no problems")
    return [ContestProblem(problem.id, problem.text, problem.answer, problem) for problem in suite.problems]


def digest_problems(problems: Sequence[ContestProblem]) -> str:
    """Return a digest of ids and texts, by which a run recognises its problems."""
    content = blake2b(digest_size=8)
    for problem in problems:
        content.update(repr((problem.id, problem.text)).encode())
    return content.hexdigest()


def _read_problem(record: Record) -> ContestProblem:
    field = next((name for name in TEXT_FIELDS if name in record.fields), TEXT_FIELDS[0])
    text = record.read_text(field, "the problem's text").strip()
    if len(text) > MAX_PROBLEM_CHARS:
        raise record.refuse(field, f"{len(text)} characters; a problem has at most {MAX_PROBLEM_CHARS}")
    answer = next((record.fields[name] for name in ANSWER_FIELDS if name in record.fields), None)
    stated = "" if answer is None else read_gold(str(answer))
    return ContestProblem(_read_id(record), text, stated or None)


def _read_id(record: Record) -> str:
    field = next((name for name in ID_FIELDS if name in record.fields), None)
    value = str(record.number) if field is None else record.fields[field]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise record.refuse(field or "id", f"{value!r} must be a text or a number that tells the problem from others")
    if len(str(value)) > MAX_ID_CHARS:
        raise record.refuse(field or "id", f"{len(str(value))} characters; an id has at most {MAX_ID_CHARS}")
    return str(value).strip()
