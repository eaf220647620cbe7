"""The answers of a contest: what is handed in for each problem, at any moment."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from reasoner.answers.votes import Vote
from reasoner.jobs.job import JobResult

CSV_FILE, JSON_FILE = "answers.csv", "answers.jsonl"
FALLBACK = "0"
"""The answer that is handed in for a problem without one where answers are whole numbers."""
_WHOLE = re.compile(r"\+?(\d[\d,]*)(?:\.0*)?")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one problem so far; ``is_final`` once its search has ended."""

    id: str
    answer: str | None
    confidence: float | None
    is_final: bool


def choose_answer(result: JobResult | None, modulo: int | None) -> str | None:
    """Return the answer to hand in: the search's, or with ``modulo`` the remainder with the most votes."""
    if result is None or modulo is None:
        return None if result is None else result.answer
    weights: dict[int, float] = {}
    for vote in result.votes or [Vote(answer=result.answer or "", count=1, weight=1.0)]:
        number = read_whole_number(vote.answer)
        if number is not None:
            weights[number % modulo] = weights.get(number % modulo, 0.0) + vote.weight
    return str(max(weights, key=lambda number: weights[number])) if weights else None


def read_whole_number(text: str) -> int | None:
    """Return the number that a text is, such as 12, 1,200 or 12.0; ``None`` for another text."""
    match = _WHOLE.fullmatch(text.strip())
    return int(match[1].replace(",", "")) if match else None


def write_answers(folder: Path, answers: Iterable[Answer], modulo: int | None) -> None:
    """Replace both files: a reader sees all of the old answers or all of the new ones."""
    answers = list(answers)
    rows, text = [], io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "answer"])
    for each in answers:
        writer.writerow([each.id, (FALLBACK if modulo is not None else "") if each.answer is None else each.answer])
        rows.append(json.dumps(asdict(each), ensure_ascii=False))
    for name, content in ((CSV_FILE, text.getvalue()), (JSON_FILE, "\n".join(rows) + "\n")):
        partial = folder / f"{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(folder / name)
