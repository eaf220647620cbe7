r"""The forms in which AIME is published: problems whose answers are whole numbers from 0 to 999.

``ID``, ``Problem``, ``Solution``, ``Answer`` (Maxwell-Jia/AIME_2024); ``id``, ``problem``, ``solution``, ``answer``,
``url``, ``year`` (HuggingFaceH4/aime_2024); ``problem``, ``answer``, ``id`` (math-ai/aime25); ``problem_idx``,
``problem``, ``answer``, ``problem_type`` (MathArena/aime_2025); ``question``, ``answer`` (opencompass/AIME2025). The
first is recognised; the others have fields that other forms have, too, and are named: ``aime:FILE``. Answers are
numbers or texts such as ``025`` and ``336^\circ``.
"""

from __future__ import annotations

import re

from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem

LARGEST = 999
_PROBLEMS = ("Problem", "problem", "question")
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?$")


def _parse(record: Record, name: str, seed: int) -> Problem:  # noqa: ARG001
    field = next((field for field in _PROBLEMS if field in record.fields), _PROBLEMS[0])
    return make_problem(
        record,
        name,
        "aime",
        text=record.read_text(field, "the problem's text").strip(),
        answer=str(_read_answer(record)),
        field=field,
    )


def _read_answer(record: Record) -> int:
    field = "Answer" if "Answer" in record.fields else "answer"
    value = record.read(field, f"a whole number from 0 to {LARGEST}")
    digits = _DEGREES.sub("", value.strip()) if isinstance(value, str) else str(value)
    is_whole = not isinstance(value, bool) and digits.isascii() and digits.isdigit()
    if not is_whole or int(digits) > LARGEST:
        raise record.refuse(field, f"{value!r} must be a whole number from 0 to {LARGEST}, as every answer of AIME is")
    return int(digits)


FORMAT = FileFormat(
    name="aime",
    title="AIME",
    marks=("Problem", "Answer"),
    fields="'ID', 'Problem' and 'Answer' (other forms of it: aime:FILE)",
    parse=_parse,
    id_fields=("ID", "id", "problem_idx"),
)
