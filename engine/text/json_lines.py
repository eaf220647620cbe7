"""JSON Lines files as other programs write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ENCODING = "utf-8-sig"
"""UTF-8, with a byte order mark or without."""


class NotUtf8(ValueError):
    """A line in another encoding than UTF-8."""


def read_json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number from 1.

    A line ends at a line feed, a carriage return, both or the file's end. Other separators, such as U+2028, may stand
    within a JSON text. Raises ``OSError``, and ``NotUtf8``, which names the line.
    """
    with path.open(encoding=ENCODING, errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if any("\udc80" <= char <= "\udcff" for char in line):  # bytes that are no UTF-8
                raise NotUtf8(f"line {number}: not UTF-8")
            if content := line.strip().lstrip("\ufeff"):
                yield number, content
