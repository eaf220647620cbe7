"""Wire format between solver and tester: JSON lines with values of built-in types, and numbers as object handles.

Decoding creates exact built-in types only. ``adopt`` maps the handle of a solver's object to a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

MAX_LINE = 1 << 20
_PLAIN = (bool, float, str, type(None))


class Closed(Exception):
    """The other process has closed the pipe."""


class Pipe:
    """Pipe for JSON documents, one per line, of at most ``MAX_LINE`` bytes."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._rest = b""

    def send(self, document: Any) -> None:
        data = json.dumps(document).encode() + b"\n"
        if len(data) > MAX_LINE:
            raise ValueError(f"more than {MAX_LINE} bytes of data in one value")
        while data:
            data = data[os.write(self._writes, data) :]

    def receive(self) -> Any:
        while b"\n" not in self._rest:
            part = os.read(self._reads, 1 << 16)
            if not part or len(self._rest) + len(part) > MAX_LINE + (1 << 16):
                raise Closed
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """Encode plain data by value, and any other object by the handle that ``refer`` returns for it."""
    if isinstance(value, _PLAIN):
        return {"v": value if isinstance(value, bool) or value is None else _to_exact(value)}
    if isinstance(value, int):
        return {"i": hex(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in value]}
    return {"o": refer(value)}


def decode(document: Any, adopt: Callable[[int], Any]) -> Any:
    """Return the encoded value. Raises ``ValueError`` or ``TypeError`` for an invalid document."""
    ((tag, body),) = document.items()
    match tag:
        case "v" if isinstance(body, _PLAIN):
            return body
        case "i":
            return int(body, 16)
        case "c":
            return complex(float(body[0]), float(body[1]))
        case "b":
            return bytes.fromhex(body)
        case "d":
            return {decode(key, adopt): decode(item, adopt) for key, item in body}
        case "l" | "t" | "s" | "f":
            return {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](decode(item, adopt) for item in body)
        case "o":
            return adopt(int(body))
    raise ValueError(f"no value: {tag!r}")


def _to_exact(value: Any) -> Any:
    """Convert an instance of a subclass to the exact built-in type, such as a ``StrEnum`` member to ``str``."""
    return float(value) if isinstance(value, float) else str.__str__(value)
