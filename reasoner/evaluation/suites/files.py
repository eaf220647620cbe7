r"""Suites in files: one JSON object per line, in the format of GSM8K or of MATH.

GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"): ``question`` and ``answer``, whose last
line is ``#### NUMBER``. MATH (Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH Dataset"):
``problem``, ``solution`` with the answer in its last ``\boxed{}`` or ``answer`` alone, ``level`` and ``subject`` (or
``type``). Other fields are ignored. The first line determines the format.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.text.json_lines import NotUtf8, read_json_lines
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.extract import extract_answer
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

TEMPERATURE = 0.8
"""Usual sampling temperature for competition problems (Beeching et al. 2024, "Scaling test-time compute")."""

_MARK = re.compile(r"####\s*([-+]?(?:\d[\d,]*)?\.?\d+)\s*$")


def open_file(path: Path, limit: int | None) -> Suite:
    """Return the first ``limit`` problems of the file. Raises ``SuiteError`` that names the line and the field."""
    problems: list[Problem] = []
    format_name = ""
    try:
        for number, line in read_json_lines(path):
            if len(problems) == limit:
                break
            where = f"{path}, line {number}"
            record = _parse_record(where, line)
            format_name = format_name or _detect_format(where, record)
            parse = _parse_gsm8k if format_name == "gsm8k" else _parse_math
            problems.append(parse(where, f"{path.stem}-{number}", record))
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror}") from None
    except NotUtf8 as error:
        raise SuiteError(f"{path}, {error}") from None
    if not problems:
        raise SuiteError(f"{path} holds no problem: it needs one JSON object a line")
    return Suite(path.stem, problems, rule=same_mathematics, temperature=TEMPERATURE, answer="math")


async def same_mathematics(problem: Problem, answer: str, equal: Equivalence) -> bool:
    """Return True if the answer is mathematically equal to the problem's answer, as in a vote."""
    return await equal.are_same(answer, problem.answer)


def read_gold(text: str) -> str:
    """Return the right answer of a text: behind the mark at its end, as in GSM8K, or all of it."""
    mark = _MARK.search(text)
    return mark[1].replace(",", "") if mark else text.strip()


def _parse_record(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SuiteError(f"{where}: not JSON ({error}); each line is one JSON object") from None
    if not isinstance(record, dict):
        raise SuiteError(f"{where}: {type(record).__name__} instead of a JSON object with the problem's fields")
    return record


def _detect_format(where: str, record: dict[str, Any]) -> str:
    if "question" in record:
        return "gsm8k"
    if "problem" in record:
        return "math"
    raise SuiteError(
        f"{where}: neither 'question' (GSM8K's shape: question, answer) nor 'problem' (MATH's: problem, solution or "
        f"answer, level, subject); its fields are {', '.join(map(repr, record)) or 'none'}"
    )


def _parse_gsm8k(where: str, name: str, record: dict[str, Any]) -> Problem:
    solution = _read_text(where, record, "answer", "the worked solution, which ends with '#### NUMBER'")
    mark = _MARK.search(solution)
    if mark is None:
        raise SuiteError(
            f"{where}, field 'answer': it must end with '#### NUMBER', as in '#### 72'; it ends with {solution[-30:]!r}"
        )
    return _make_problem(
        where, name, suite="gsm8k", level="", record=record, field="question", answer=mark[1].replace(",", "")
    )


def _parse_math(where: str, name: str, record: dict[str, Any]) -> Problem:
    if "answer" in record:
        answer: str | None = _read_text(where, record, "answer", "the final answer, as it would stand in the box")
    else:
        answer = extract_answer(
            _read_text(where, record, "solution", "the worked solution with the answer in \\boxed{}")
        )
        if answer is None:
            raise SuiteError(f"{where}, field 'solution': no \\boxed{{}} with an answer; write one, or give 'answer'")
    assert answer is not None
    level = record.get("level", "")
    if not isinstance(level, str | int) or isinstance(level, bool):
        raise SuiteError(f"{where}, field 'level': {level!r} must be a text or a whole number, as in 'Level 5' or 5")
    return _make_problem(where, name, suite="math", level=str(level), record=record, field="problem", answer=answer)


def _make_problem(
    where: str, name: str, suite: str, level: str, record: dict[str, Any], field: str, answer: str
) -> Problem:
    text = _read_text(where, record, field, "the problem's text").strip()
    if len(text) > MAX_PROBLEM_CHARS:
        raise SuiteError(f"{where}, field {field!r}: {len(text)} characters; a problem has at most {MAX_PROBLEM_CHARS}")
    subject = record.get("subject", record.get("type", ""))
    return Problem(
        name,
        suite,
        level=level,
        text=text,
        answer=answer,
        data={"subject": subject} if isinstance(subject, str) else {},
    )


def _read_text(where: str, record: dict[str, Any], field: str, meaning: str) -> str:
    if field not in record:
        raise SuiteError(f"{where}: field {field!r} is missing: {meaning}")
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise SuiteError(f"{where}, field {field!r}: {value!r} must be a text that is not empty: {meaning}")
    return value
