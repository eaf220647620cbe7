"""JSON Lines files as other programs write them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ENCODING = "utf-8-sig"
"""UTF-8, with a byte order mark or without."""


class NotUtf8(ValueError):
    """A line in another encoding than UTF-8."""


def read_json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number from 1.

    A line ends at a line feed, a carriage return, both or the file's end. Other separators, such as U+2028, may stand
    within a JSON text. A ``.gz`` file is unpacked. Raises ``OSError``, ``EOFError`` for a ``.gz`` that is cut off, and
    ``NotUtf8``, which names the line.
    """
    with _open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if any("\udc80" <= char <= "\udcff" for char in line):  # bytes that are no UTF-8
                raise NotUtf8(f"line {number}: not UTF-8")
            if content := line.strip().lstrip("\ufeff"):
                yield number, content


def _open_text(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding=ENCODING, errors="surrogateescape")
