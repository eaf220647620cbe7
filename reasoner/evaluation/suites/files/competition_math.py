r"""The form of MATH and MATH-500, and of files of one's own.

MATH (Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH Dataset"): ``problem``, ``solution``
with the answer in its last ``\boxed{}``, ``level`` and ``type``. MATH-500 (Lightman et al. 2023, "Let's Verify Step by
Step"): ``problem``, ``solution``, ``answer``, ``subject``, ``level`` and ``unique_id``. Other fields are ignored.
"""

from __future__ import annotations

from reasoner.answers.extraction.extract import extract_answer
from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem


def _parse(record: Record, name: str, seed: int) -> Problem:  # noqa: ARG001
    level = record.fields.get("level", "")
    if not isinstance(level, str | int) or isinstance(level, bool):
        raise record.refuse("level", f"{level!r} must be a text or a whole number, as in 'Level 5' or 5")
    subject = record.fields.get("subject", record.fields.get("type", ""))
    return make_problem(
        record,
        name,
        "math",
        text=record.read_text("problem", "the problem's text").strip(),
        answer=_read_answer(record),
        field="problem",
        level=str(level),
        data={"subject": subject} if isinstance(subject, str) else {},
    )


def _read_answer(record: Record) -> str:
    if "answer" in record.fields:
        return record.read_text("answer", "the final answer, as it would stand in the box")
    answer = extract_answer(record.read_text("solution", "the worked solution with the answer in \\boxed{}"))
    if answer is None:
        raise record.refuse("solution", "no \\boxed{} with an answer; write one, or give 'answer'")
    return answer


FORMAT = FileFormat(
    name="math",
    title="MATH",
    marks=("problem",),
    fields="'problem', 'solution' or 'answer', 'level' and 'subject'",
    parse=_parse,
    id_fields=("unique_id",),
)
