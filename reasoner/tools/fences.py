"""Fenced blocks of a solution: Python that a model writes to be run, and the blocks of what it printed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
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
    follows_block: bool
    """True if nothing but white space stands between it and the block before."""


def find_call(text: str) -> str | None:
    """Return the code of the closed Python block with which a text ends; ``None`` if it ends with something else."""
    last = next(iter(deque(_read_blocks(text), maxlen=1)), None)
    is_call = last is not None and last.is_closed and last.ends_text and last.language in PYTHON_NAMES
    return last.code if last is not None and is_call else None


def find_cells(text: str) -> list[str]:
    """Return the codes of the Python blocks that ran, whose output follows, and of one that ends the text.

    A block that a limit kept from running is no part of the state, if the search goes on behind it.
    """
    blocks = list(_read_blocks(text))
    following = [*blocks[1:], None]
    return [
        block.code
        for block, after in zip(blocks, following, strict=True)
        if block.is_closed and block.language in PYTHON_NAMES and (block.ends_text or _is_output(after))
    ]


def is_in_block(text: str) -> bool:
    """Return True if a text ends within a block that is not closed yet."""
    return any(not block.is_closed for block in _read_blocks(text))


def format_output(before: str, output: str) -> str:
    """Return the block of a call's output, as it follows the text ``before``."""
    body = _LINE_OF_FENCE.sub(" ", output)  # a line of three backticks would end the block
    if body and not body.endswith("\n"):
        body += "\n"
    return f"{'' if before.endswith(chr(10)) else chr(10)}{_FENCE}output\n{body}{_FENCE}\n"


def _is_output(block: _Block | None) -> bool:
    """Return True if a block is the output of the block before."""
    return block is not None and block.language == "output" and block.follows_block


def _read_blocks(text: str) -> Iterator[_Block]:
    """Yield the fenced blocks of a text, as Markdown has them, without indented ones."""
    lines = text.split("\n")
    language: str | None = None
    begin, end = 0, -1
    for number, line in enumerate(lines):
        if language is not None and line.rstrip() == _FENCE:
            code, ends_text = "\n".join(lines[begin:number]), not _has_text(lines[number + 1 :])
            follows = end >= 0 and not _has_text(lines[end + 1 : begin - 1])
            yield _Block(language, code, is_closed=True, ends_text=ends_text, follows_block=follows)
            language, end = None, number
        elif language is None and (opening := _OPENING.fullmatch(line)):
            language, begin = opening[1].lower(), number + 1
    if language is not None:
        yield _Block(language, "\n".join(lines[begin:]), is_closed=False, ends_text=True, follows_block=False)


def _has_text(lines: Sequence[str]) -> bool:
    return any(line.strip() for line in lines)
