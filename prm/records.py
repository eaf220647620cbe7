"""Files of JSON records. Errors name the line, the field and the valid values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from engine.text.json_lines import ENCODING, NotUtf8, read_json_lines


class BadRecord(ValueError):
    """A file cannot be read or has an invalid record; the message names the line and a correction."""


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One JSON object and its position in the file."""

    location: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a text that is not blank. Raises ``BadRecord``, as do all of these methods."""
        value: str = self._get_field(name, "a text that is not blank", lambda v: isinstance(v, str) and bool(v.strip()))
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of at least one text; texts may be blank."""
        return tuple(self._get_field(name, "a list of at least one text", lambda v: bool(v) and _is_list_of(v, str)))

    def shares(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` numbers from 0 to 1."""
        right = f"a list of {count} numbers from 0 to 1, one for each step"
        values = self._get_field(name, right, lambda v: _is_list_of(v, int | float) and len(v) == count)
        if not all(0 <= value <= 1 for value in values):
            raise self.wrong(name, right)
        return tuple(map(float, values))

    def flag(self, name: str) -> bool:
        value: bool = self._get_field(name, "true or false", lambda v: isinstance(v, bool))
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        """Return an integer within inclusive bounds."""
        right = f"a whole number from {least} to {most}"
        value: int = self._get_field(name, right, lambda v: type(v) is int and least <= v <= most)
        return value

    def wrong(self, name: str, right: str) -> BadRecord:
        """Return the error for an invalid field; ``right`` describes valid values."""
        value = json.dumps(self.fields[name], ensure_ascii=False)
        value = value if len(value) <= 80 else value[:77] + "..."
        return BadRecord(f"{self.location}: {name!r} is {value}; it must be {right}")

    def _get_field(self, name: str, right: str, is_valid: Callable[[Any], bool]) -> Any:
        if name not in self.fields:
            raise BadRecord(f"{self.location}: {name!r} is missing; there are {', '.join(self.fields) or 'no fields'}")
        if not is_valid(self.fields[name]):
            raise self.wrong(name, right)
        return self.fields[name]


def _is_list_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def read_records(path: Path) -> Iterator[JsonRecord]:
    """Yield the records of a JSONL file line by line, or of a file with one JSON array. Raises ``BadRecord``."""
    try:
        _, first = next(read_json_lines(path), (0, ""))
        if first.startswith("["):
            content = path.read_text(encoding=ENCODING)
            for number, item in enumerate(_parse(str(path), content, "a JSON array"), 1):
                yield _check_record(f"{path}, item {number}", item)
            return
        for number, line in read_json_lines(path):
            yield _check_record(f"{path}, line {number}", _parse(f"{path}, line {number}", line, "JSON"))
    except (OSError, NotUtf8) as error:
        raise BadRecord(f"{path} cannot be read: {error}") from None


def _parse(location: str, text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(f"{location}: not {kind}: {error}") from None


def _check_record(location: str, value: Any) -> JsonRecord:
    if not isinstance(value, dict):
        raise BadRecord(f"{location}: a JSON object is expected, this is {type(value).__name__}")
    return JsonRecord(location, value)
