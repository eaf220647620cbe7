"""Files of JSON records. Errors name the line, the field and the valid values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadRecord(ValueError):
    """A file cannot be read or has an invalid record; the message names the line and a correction."""


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One JSON object and its position in the file."""

    place: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a text that is not blank. Raises ``BadRecord``, as do all of these methods."""
        value = self._get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, "a text that is not blank")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of at least one text; texts may be blank."""
        value = self._get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of at least one text")
        return tuple(value)

    def shares(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` numbers from 0 to 1."""
        value = self._get(name)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(isinstance(item, int | float) and 0 <= item <= 1 for item in value):
            raise self.wrong(name, f"a list of {count} numbers from 0 to 1, one for each step")
        return tuple(map(float, value))

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        """Return an integer within inclusive bounds."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def wrong(self, name: str, right: str) -> BadRecord:
        """Return the error for an invalid field; ``right`` describes valid values."""
        told = json.dumps(self.fields[name], ensure_ascii=False)
        return BadRecord(
            f"{self.place}: {name!r} is {told if len(told) <= 80 else told[:77] + '...'}; it must be {right}"
        )

    def _get(self, name: str) -> Any:
        if name not in self.fields:
            raise BadRecord(f"{self.place}: {name!r} is missing; there are {', '.join(self.fields) or 'no fields'}")
        return self.fields[name]


def read_records(path: Path) -> Iterator[JsonRecord]:
    """Yield the records of a JSONL file line by line, or of a file with one JSON array. Raises ``BadRecord``."""
    try:
        with path.open(encoding="utf-8") as lines:
            if lines.read(1) == "[":
                lines.seek(0)
                yield from _of_array(path, lines.read())
                return
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _record(f"{path}, line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecord(f"{path} cannot be read: {error}") from None


def _of_array(path: Path, text: str) -> Iterator[JsonRecord]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise BadRecord(f"{path} is not a JSON array: {error}") from None
    for number, item in enumerate(items, 1):
        yield _checked(f"{path}, item {number}", item)


def _record(place: str, line: str) -> JsonRecord:
    try:
        return _checked(place, json.loads(line))
    except json.JSONDecodeError as error:
        raise BadRecord(f"{place}: not JSON: {error}") from None


def _checked(place: str, value: Any) -> JsonRecord:
    if not isinstance(value, dict):
        raise BadRecord(f"{place}: a JSON object is expected, this is {type(value).__name__}")
    return JsonRecord(place, value)
