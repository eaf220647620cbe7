"""The own form of files with candidates.

``question`` (or ``problem``), ``candidates``, a list of texts or of conversations, and ``answer`` (or ``gold``), the
right answer alone or at the end of a solution as in GSM8K (``#### 72``), which may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from reasoner.evaluation.logs.log_format import LabelledCandidates, LogFormat, check_candidates, read_right_answer
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.suite import SuiteError

_QUESTION_FIELDS, _GOLD_FIELDS = ("question", "problem"), ("answer", "gold")


def read_questions(records: Iterable[Record], title: str, limit: int | None) -> list[LabelledCandidates]:
    """Return the first questions of a file. Raises ``SuiteError``."""
    return [_parse(record, f"{title}-{record.number}") for record in islice(records, limit)]


def _parse(record: Record, name: str) -> LabelledCandidates:
    question = next((record.fields[field] for field in _QUESTION_FIELDS if field in record.fields), None)
    if not isinstance(question, str) or not question.strip():
        raise SuiteError(
            f"{record.where}: it needs a text 'question' (or 'problem'); its fields are {', '.join(record.fields)}"
        )
    candidates = record.read("candidates", "it needs 'candidates', a list of texts or conversations")
    found = next((field for field in _GOLD_FIELDS if record.fields.get(field) is not None), None)
    gold = None if found is None else read_right_answer(record, found, record.fields[found])
    return LabelledCandidates(name, question.strip(), check_candidates(record, "candidates", candidates), gold)


FORMAT = LogFormat("questions with candidates", (), read_questions)
