"""Records of a file of problems, each with the place where it stands: JSON Lines (also gzipped), CSV or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.text.json_lines import ENCODING, NotUtf8, read_json_lines
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.training_data.parquet import MissingParquet, load_pyarrow

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".csv", ".parquet")
MAX_CELL_CHARS = 16_000_000
"""Longest cell of a CSV file; Python's own limit is 128 KiB."""


@dataclass(frozen=True, slots=True)
class Record:
    """One problem as its file has it."""

    where: str
    """File and line, or row of a Parquet file, for messages."""
    number: int
    """Number of the line or row, from 1."""
    fields: Mapping[str, Any]

    def refuse(self, field: str, problem: str) -> SuiteError:
        """Return the error that names the place, the field and the problem."""
        return SuiteError(f"{self.where}, field {field!r}: {problem}")

    def read(self, field: str, meaning: str) -> Any:
        """Return a field's value. Raises ``SuiteError`` if the record has none."""
        if field not in self.fields:
            raise SuiteError(f"{self.where}: field {field!r} is missing: {meaning}")
        return self.fields[field]

    def read_text(self, field: str, meaning: str) -> str:
        """Return a field's text, as it is. Raises ``SuiteError`` if it is missing, empty or no text."""
        value = self.read(field, meaning)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(field, f"{value!r} must be a text that is not empty: {meaning}")
        return value


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, by its suffix; another suffix is read as JSON Lines. Raises ``SuiteError``."""
    try:
        match path.suffix:
            case ".csv":
                yield from _read_csv(path)
            case ".parquet":
                yield from _read_parquet(path)
            case _:
                yield from _read_json_lines(path)
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror or error}") from None
    except EOFError:
        raise SuiteError(f"{path}: the compressed file is not complete") from None
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except NotUtf8 as error:
        raise SuiteError(f"{path}, {error}") from None


def _read_json_lines(path: Path) -> Iterator[Record]:
    for number, line in read_json_lines(path):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise SuiteError(f"{where}: not JSON ({error}); each line is one JSON object") from None
        if not isinstance(fields, dict):
            raise SuiteError(f"{where}: {type(fields).__name__} instead of a JSON object with the problem's fields")
        yield Record(where, number, fields)


def _read_csv(path: Path) -> Iterator[Record]:
    """Yield the rows below the header; a row begins at the line after the one at which the row before it ended."""
    csv.field_size_limit(MAX_CELL_CHARS)
    with path.open(encoding=ENCODING, newline="") as file:
        rows = csv.reader(file, strict=True)
        ended = 0
        header: list[str] = []
        try:
            for row in rows:
                where, ended = f"{path}, line {ended + 1}", rows.line_num
                if not header:
                    header = row
                elif row and len(row) != len(header):
                    raise SuiteError(f"{where}: {len(row)} cells, but the header has {len(header)}")
                elif row:
                    yield Record(where, ended, dict(zip(header, row, strict=True)))
        except csv.Error as error:
            raise SuiteError(f"{path}, line {ended + 1}: not CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        load_pyarrow()
    except MissingParquet as error:
        raise SuiteError(f"{path}: {error}") from None
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
            for fields in batch.to_pylist():
                number += 1
                yield Record(f"{path}, row {number}", number, fields)
    except pyarrow.ArrowInvalid as error:
        raise SuiteError(f"{path}: it is no Parquet file ({error})") from None
