"""The form of GPQA: a question, its right answer and three wrong ones, which are shuffled to the letters A to D.

Source: Rein et al. 2023, "GPQA: A Graduate-Level Google-Proof Q&A Benchmark". The published CSV files have, beside
others that are ignored, the columns ``Record ID``, ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to ``3``,
``High-level domain`` and ``Subdomain``.
"""

from __future__ import annotations

import random

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem

LETTERS = "ABCD"
RIGHT = "Correct Answer"
WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _parse(record: Record, name: str, seed: int) -> Problem:
    question = record.read_text("Question", "the problem's text").strip()
    right = record.read_text(RIGHT, "the right answer").strip()
    choices = [right, *(record.read_text(field, "a wrong answer").strip() for field in WRONG)]
    order = random.Random(f"gpqa/{seed}/{name}").sample(range(len(choices)), len(choices))
    lines = [f"({letter}) {choices[index]}" for letter, index in zip(LETTERS, order, strict=True)]
    return make_problem(
        record,
        name,
        "gpqa",
        text=question + "\n\n" + "\n".join(lines),
        answer=LETTERS[order.index(0)],
        field="Question",
        data={"subject": str(record.fields.get("High-level domain", ""))},
    )


async def is_right_letter(problem: Problem, answer: str, equal: Equivalence) -> bool:
    """Return True if the answer names the letter of the right choice."""
    return await equal.are_same(answer, problem.answer, "choice")


FORMAT = FileFormat(
    name="gpqa",
    title="GPQA",
    marks=(RIGHT, *WRONG),
    fields="'Record ID', 'Question', 'Correct Answer' and 'Incorrect Answer 1' to 3",
    parse=_parse,
    id_fields=("Record ID",),
    has_ids=True,
    rule=is_right_letter,
    answer=AnswerSpec(compare="choice"),
)
