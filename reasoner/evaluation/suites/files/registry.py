"""Registry of the forms of files, and the function that opens a file as a suite."""

from __future__ import annotations

from pathlib import Path

from reasoner.evaluation.suites.files import aime, competition_math, gpqa, gsm8k, humaneval, livecodebench
from reasoner.evaluation.suites.files.file_format import FileFormat
from reasoner.evaluation.suites.files.records import Record, read_records
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError

FORMATS: dict[str, FileFormat] = {
    each.name: each
    for each in (
        livecodebench.FORMAT,
        humaneval.FORMAT,
        gpqa.FORMAT,
        aime.FORMAT,
        gsm8k.FORMAT,
        competition_math.FORMAT,
    )
}
"""Forms by name, in the order in which they are looked for."""


def open_file(path: Path, limit: int | None, seed: int = 0, format_name: str | None = None) -> Suite:
    """Return the first ``limit`` problems of the file; without ``format_name`` its first record determines the form.

    ``seed`` shuffles what a form shuffles. Raises ``SuiteError`` that names the line and the field.
    """
    title = Path(path.name.removesuffix(".gz")).stem
    chosen = None if format_name is None else FORMATS[format_name]
    id_field: str | None = None
    places: dict[str, str] = {}
    problems: list[Problem] = []
    for record in read_records(path):
        if len(problems) == limit:
            break
        if chosen is None:
            chosen = _detect_format(record)
        if not problems:
            id_field = _choose_id_field(chosen, record)
        name = f"{title}-{record.number}" if id_field is None else _read_id(record, id_field, places)
        problems.append(chosen.parse(record, name, seed))
    if chosen is None or not problems:
        raise SuiteError(f"{path} holds no problem: it needs one record a problem, such as one JSON object a line")
    return Suite(
        title,
        problems,
        rule=chosen.rule,
        temperature=chosen.temperature,
        answer=chosen.answer,
        runs_code=chosen.runs_code,
    )


def _detect_format(record: Record) -> FileFormat:
    for each in FORMATS.values():
        if all(mark in record.fields for mark in each.marks):
            return each
    known = "; ".join(f"{each.title} has {each.fields}" for each in FORMATS.values())
    raise SuiteError(
        f"{record.where}: no known form: {known}; its fields are {', '.join(map(repr, record.fields)) or 'none'}"
    )


def _choose_id_field(chosen: FileFormat, record: Record) -> str | None:
    found = next((field for field in chosen.id_fields if field in record.fields), None)
    if found is None and chosen.has_ids:
        raise SuiteError(f"{record.where}: field {chosen.id_fields[0]!r} is missing: the id of the problem")
    return found


def _read_id(record: Record, field: str, places: dict[str, str]) -> str:
    """Return the id of a record. Raises ``SuiteError`` if it has none, or that of an earlier one in ``places``."""
    value = record.read(field, "the id of the problem, which the first one has")
    is_text = isinstance(value, str) and bool(value.strip())
    if not is_text and (not isinstance(value, int) or isinstance(value, bool)):
        raise record.refuse(field, f"{value!r} must be the id of the problem, a text or a whole number")
    name = str(value).strip()
    if name in places:
        raise record.refuse(field, f"{name!r} is the id of another problem, too: {places[name]}")
    places[name] = record.where
    return name
