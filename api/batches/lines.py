"""Lines of a batch's file: reading them from any position, and checking what all endpoints have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.http.problems import Problem
from api.http.request_parsing import parse_json
from workers.store.file_batches import Position

MAX_ID_CHARS = 512
CHUNK_LINES = 64
"""Lines that are read, and submitted, at a time."""
CHUNK_BYTES = 4 << 20
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not empty: its index among these, its number in the file, and the position behind it.

    ``data`` is ``None`` if it has more bytes than a request may have.
    """

    index: int
    number: int
    behind: Position
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a file. ``custom_id`` is ``None`` if the line does not have one."""

    custom_id: str | None
    body: dict[str, Any]


class InvalidLine(Exception):
    """A line is no request to the endpoint of its batch."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id


def read_chunk(path: Path, start: Position, count: int, max_bytes: int) -> list[RawLine]:
    """Return up to ``count`` lines from a position, fewer if they are long; none at the end of the file.

    ``max_bytes``: the length of a line that is read.
    """
    lines: list[RawLine] = []
    num_bytes = 0
    for line in _iterate_lines(path, start, max_bytes):
        lines.append(line)
        num_bytes += len(line.data or b"")
        if len(lines) == count or num_bytes >= CHUNK_BYTES:
            break
    return lines


def _iterate_lines(path: Path, start: Position, max_bytes: int) -> Iterator[RawLine]:
    index, number, offset = start.index, start.line, start.offset
    with path.open("rb") as file:
        file.seek(offset)
        while part := file.readline(max_bytes + 1):
            data: bytes | None = part
            offset += len(part)
            while len(part) > max_bytes and not part.endswith(b"\n"):  # the rest of a line that is too long
                part = file.readline(max_bytes + 1)
                data, offset = None, offset + len(part)
            number += 1
            if data is None or data.strip():
                yield RawLine(index, number, Position(index + 1, number, offset), data)
                index += 1


def parse_line(raw: RawLine, endpoint: str) -> Line:
    """Return the request of a line. Raises ``InvalidLine``."""
    if raw.data is None:
        raise InvalidLine("line_too_long", "the line is longer than a request may be")
    try:
        request = parse_json(raw.data.strip())
    except Problem as problem:
        raise InvalidLine("invalid_json", problem.detail.replace("the body is", "it is")) from None
    if not isinstance(request, dict):
        raise InvalidLine("invalid_json", f"it is no JSON object with the fields {', '.join(_FIELDS)}")
    given = request.get("custom_id")
    custom_id = given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS else None
    if custom_id is None:
        message = f"give a text of 1 to {MAX_ID_CHARS} characters that no other line has"
        raise InvalidLine("invalid_custom_id", f"custom_id: {message}", "custom_id")
    for field, right in (("method", "POST"), ("url", endpoint)):
        if request.get(field) != right:
            message = f"{field}: it must be {right!r}, as of all lines of this batch"
            raise InvalidLine(f"invalid_{field}", message, field, custom_id)
    body = request.get("body")
    if not isinstance(body, dict):
        message = f"body: it must be a JSON object, the body of a request to {endpoint}"
        raise InvalidLine("invalid_body", message, "body", custom_id)
    if unknown := [name for name in request if name not in _FIELDS]:
        message = f"{unknown[0]}: unknown field; known fields: {', '.join(_FIELDS)}"
        raise InvalidLine("unknown_field", message, unknown[0], custom_id)
    if body.get("stream"):
        message = "body.stream: a line has its answer in the results, not as a stream: leave it out"
        raise InvalidLine("invalid_body", message, "body.stream", custom_id)
    return Line(custom_id, body)
