"""The form of a log: by which fields it is recognised, and how its records become questions with candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from reasoner.evaluation.suites.files.gsm8k import read_gold
from reasoner.evaluation.suites.files.records import Record
from reasoner.jobs.candidate_spec import Candidates

_CANDIDATES: TypeAdapter[Any] = TypeAdapter(Candidates)


@dataclass(frozen=True, slots=True)
class LabelledCandidates:
    """A question with candidates; ``gold`` is the right answer, ``None`` if the file has none."""

    id: str
    question: str
    candidates: list[Any]
    gold: str | None

    def to_spec(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of the job that ranks the candidates."""
        return {"problem": self.question, "candidates": self.candidates, **fields}


@dataclass(frozen=True, slots=True)
class LogFormat:
    """One form in which candidates are published, a record a line."""

    title: str
    marks: tuple[str, ...]
    """Fields that the first record of such a file has, and that of no earlier form has all of."""
    read: Callable[[Iterable[Record], str, int | None], list[LabelledCandidates]]
    """Function of the records, the file's name and the largest number of questions. Raises ``SuiteError``."""


def check_candidates(record: Record, field: str, candidates: Sequence[Any]) -> list[Any]:
    """Return candidates that a job may rank. Raises ``SuiteError`` that names the first that it may not."""
    try:
        _CANDIDATES.validate_python(candidates)
    except ValidationError as error:
        first = error.errors()[0]
        raise record.refuse(".".join(map(str, (field, *first["loc"]))), first["msg"]) from None
    return list(candidates)


def read_right_answer(record: Record, field: str, value: Any) -> str:
    """Return the right answer that a field has, alone or at the end of a solution as in GSM8K (``#### 72``)."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise record.refuse(field, f"{value!r} must be the right answer, a text or a number")
    return read_gold(str(value))


class SameCount:
    """Checks that the questions of a file are different, and that each has as many candidates as the first."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._first: tuple[str, int] | None = None

    def add(self, record: Record, field: str, name: str, count: int) -> None:
        """Check one more question. Raises ``SuiteError`` that names the field, and the record that it contradicts."""
        if name in self._places:
            raise record.refuse(field, f"{name!r} is there twice, also at {self._places[name]}")
        self._places[name] = record.where
        if self._first is None:
            self._first = record.where, count
        elif self._first[1] != count:
            raise record.refuse(field, f"{name!r} has {count} candidates, but {self._first[0]} has {self._first[1]}")
