"""The completions that search-and-learn saves: ``best_of_n_completions.jsonl``, or its data sets as Parquet.

A record is a problem of its data set (for MATH-500 ``problem``, ``solution``, ``answer``, ``unique_id``) with
``completions``, ``scores`` (a list of step scores for each), ``pred`` and ``completion_tokens``. Sources:
``src/sal/search/best_of_n.py``, ``src/sal/utils/data.py``; Beeching et al. 2024, "Scaling test-time compute".
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from reasoner.evaluation.logs.log_format import (
    LabelledCandidates,
    LogFormat,
    SameCount,
    check_candidates,
    read_right_answer,
)
from reasoner.evaluation.suites.files.records import Record

_ANSWERS = "the right answer of the problem, as in MATH-500"


def read_completions(records: Iterable[Record], title: str, limit: int | None) -> list[LabelledCandidates]:
    """Return the first problems of a file. Raises ``SuiteError``."""
    questions, same = [], SameCount()
    for record in islice(records, limit):
        problem = record.read_text("problem", "the question").strip()
        completions = record.read("completions", "the texts of the solutions")
        candidates = check_candidates(record, "completions", completions)
        scores = record.read("scores", "a list of scores for each of the completions")
        if not isinstance(scores, list) or len(scores) != len(candidates):
            raise record.refuse("scores", f"it must be a list for each of the {len(candidates)} completions")
        same.add(record, "problem", problem, len(candidates))
        gold = read_right_answer(record, "answer", record.read("answer", _ANSWERS))
        questions.append(LabelledCandidates(f"{title}-{record.number}", problem, candidates, gold))
    return questions


FORMAT = LogFormat("completions of search-and-learn", ("completions", "pred"), read_completions)
