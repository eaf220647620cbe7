r"""The form of GSM8K: ``question`` and ``answer``, whose last line is ``#### NUMBER``.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems". Other fields are ignored.
"""

from __future__ import annotations

import re

from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem

_MARK = re.compile(r"####\s*([-+]?(?:\d[\d,]*)?\.?\d+)\s*$")


def read_gold(text: str) -> str:
    """Return the right answer of a text: behind the mark at its end, as in GSM8K, or all of it."""
    mark = _MARK.search(text)
    return mark[1].replace(",", "") if mark else text.strip()


def _parse(record: Record, name: str, seed: int) -> Problem:  # noqa: ARG001
    solution = record.read_text("answer", "the worked solution, which ends with '#### NUMBER'")
    mark = _MARK.search(solution)
    if mark is None:
        raise record.refuse(
            "answer", f"it must end with '#### NUMBER', as in '#### 72'; it ends with {solution[-30:]!r}"
        )
    return make_problem(
        record,
        name,
        "gsm8k",
        text=record.read_text("question", "the problem's text").strip(),
        answer=mark[1].replace(",", ""),
        field="question",
    )


FORMAT = FileFormat(
    name="gsm8k",
    title="GSM8K",
    marks=("question",),
    fields="'question' and 'answer', which ends with '#### NUMBER'",
    parse=_parse,
)
