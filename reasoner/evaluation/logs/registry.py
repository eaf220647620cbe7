"""Registry of the forms of candidates, and the function that reads a file of any of them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from reasoner.evaluation.logs import candidate_file, inspect_log, lm_eval, search_and_learn
from reasoner.evaluation.logs.log_format import LabelledCandidates
from reasoner.evaluation.suites.files.records import read_records
from reasoner.evaluation.suites.suite import SuiteError

FORMATS = (lm_eval.FORMAT, lm_eval.OLD_FORMAT, search_and_learn.FORMAT, candidate_file.FORMAT)
"""Forms with a record a line, in the order in which they are looked for; the last one is that of all other files."""


def read_questions(path: Path, limit: int | None = None) -> list[LabelledCandidates]:
    """Return the questions of a file. Raises ``SuiteError`` that names the line, the field and what would be right."""
    if inspect_log.is_log(path):
        questions = inspect_log.read_log(path, limit)
    else:
        records = read_records(path)
        first = next(records, None)
        if first is None:
            raise SuiteError(f"{path} holds no question: it needs one JSON object a line")
        chosen = next(each for each in FORMATS if all(mark in first.fields for mark in each.marks))
        title = Path(path.name.removesuffix(".gz")).stem
        questions = chosen.read(chain([first], records), title, limit)
    if not questions:
        raise SuiteError(f"{path} holds no question")
    return questions
