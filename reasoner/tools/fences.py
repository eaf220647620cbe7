"""Fenced blocks of a solution: Python that a model writes to be run, and the blocks of what it printed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

CALL_END = "\n```"
"""The text that ends every block, and that begins most of them."""
_FENCE = "```"
PYTHON_NAMES = frozenset({"python", "py", "python3"})
"""Names of Python behind a fence."""
_OPENING = re.compile(r"```[ \t]*([^\s`]*)[^`]*")
_LINE_OF_FENCE = re.compile(r"^(?=```)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    code: str
    is_closed: bool
    ends_text: bool
    """True if nothing but white space follows."""


def find_call(text: str) -> str | None:
    """Return the code of the closed Python block with which a text ends; ``None`` if it ends with something else."""
    last = next(iter(deque(_read_blocks(text), maxlen=1)), None)
    is_call = last is not None and last.is_closed and last.ends_text and last.language in PYTHON_NAMES
    return last.code if last is not None and is_call else None


def find_cells(text: str) -> list[str]:
    """Return the codes of all closed Python blocks of a text, in order."""
    return [block.code for block in _read_blocks(text) if block.is_closed and block.language in PYTHON_NAMES]


def is_in_block(text: str) -> bool:
    """Return True if a text ends within a block that is not closed yet."""
    return any(not block.is_closed for block in _read_blocks(text))


def format_output(before: str, output: str) -> str:
    """Return the block of a call's output, as it follows the text ``before``."""
    body = _LINE_OF_FENCE.sub(" ", output)  # a line of three backticks would end the block
    if body and not body.endswith("\n"):
        body += "\n"
    return f"{'' if before.endswith(chr(10)) else chr(10)}{_FENCE}output\n{body}{_FENCE}\n"


def _read_blocks(text: str) -> Iterator[_Block]:
    """Yield the fenced blocks of a text, as Markdown has them, without indented ones."""
    lines = text.split("\n")
    language: str | None = None
    begin = 0
    for number, line in enumerate(lines):
        if language is not None and line.rstrip() == _FENCE:
            ends_text = not any(rest.strip() for rest in lines[number + 1 :])
            yield _Block(language, "\n".join(lines[begin:number]), True, ends_text)
            language = None
        elif language is None and (opening := _OPENING.fullmatch(line)):
            language, begin = opening[1].lower(), number + 1
    if language is not None:
        yield _Block(language, "\n".join(lines[begin:]), False, True)
