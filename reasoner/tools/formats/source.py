"""Reading of a text that may still grow.

A reader is a generator. It yields the deltas that it has read, and ``None`` where it cannot go on without more text.
So the reader of a format is written like one for a finished text, and a long call is not read anew with every piece.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reasoner.tools.formats.answer import AnswerWriter, Delta
from reasoner.tools.formats.call import MalformedCall, excerpt

_Result = TypeVar("_Result")
Reading = Generator[Delta | None, None, _Result]

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Start:
    """Position of a call's beginning."""

    index: int
    is_certain: bool
    """False if the text ends there, and could go on so that no call begins."""


class StartPattern:
    """Pattern of the beginning of calls, which also finds beginnings that the end of the text cuts.

    Each alternative is a sequence of regular expressions, which match one after the other. A cut is recognized only
    between two of them, so a delimiter is spelled by ``split_literal``.
    """

    def __init__(self, *alternatives: Sequence[str]) -> None:
        whole = "|".join("".join(parts) for parts in alternatives)
        cut = "|".join(_match_beginnings(parts) for parts in alternatives)
        self._pattern = re.compile(f"(?P<whole>{whole})|{cut}", re.MULTILINE)

    def find(self, text: str, start: int = 0) -> Start | None:
        """Return the first beginning at or after ``start``."""
        match = self._pattern.search(text, start)
        if match is None:
            return None
        matched = match.group()
        return Start(match.start() + len(matched) - len(matched.lstrip()), match.group("whole") is not None)


def split_literal(text: str) -> tuple[str, ...]:
    """Return the regular expressions of a text's characters."""
    return tuple(map(re.escape, text))


def _match_beginnings(parts: Sequence[str]) -> str:
    """Return a regular expression of the first part and as many others as there are before the end of the text."""
    expression = ""
    for part in reversed(parts[1:]):
        expression = rf"(?:{part}{expression}|\Z)"
    return parts[0] + expression


class Source:
    """A text, and the position up to which it is read. All methods that are generators read, and wait for more."""

    def __init__(self, text: str = "", *, is_final: bool = False) -> None:
        self.text = text
        self.position = 0
        self.is_final = is_final
        """True if the text does not grow any more."""

    def skip_space(self) -> Reading[None]:
        """Skip white space."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None  # it matches an empty text
            self.position = match.end()
            if self.position < len(self.text) or self.is_final:
                return
            yield None

    def peek(self) -> Reading[str]:
        """Return the next character after white space without reading it, or an empty text at the end."""
        yield from self.skip_space()
        return self.text[self.position : self.position + 1]

    def accept(self, *literals: str) -> Reading[str | None]:
        """Read one of the literals after white space, and return it, or read white space only and return ``None``."""
        yield from self.skip_space()
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.position):
                    self.position += len(literal)
                    return literal
            rest = self.text[self.position : self.position + max(map(len, literals))]
            if self.is_final or not any(literal.startswith(rest) for literal in literals):
                return None
            yield None

    def expect(self, *literals: str) -> Reading[str]:
        """Read one of the literals after white space, and return it. Raises ``MalformedCall`` for another text."""
        literal = yield from self.accept(*literals)
        if literal is None:
            raise self.refuse(" or ".join(map(repr, literals)))
        return literal

    def take_until(self, *literals: str) -> Reading[tuple[str, str]]:
        """Read up to the first of the literals and behind it, and return the text before it, and which one it is.

        Raises ``MalformedCall`` if the text ends before.
        """
        searched = self.position
        while True:
            ends = [(self.text.find(literal, searched), literal) for literal in literals]
            if any(end >= 0 for end, _ in ends):
                end, literal = min((end, literal) for end, literal in ends if end >= 0)
                taken = self.text[self.position : end]
                self.position = end + len(literal)
                return taken, literal
            if self.is_final:
                raise MalformedCall(
                    f"{' or '.join(map(repr, literals))} is missing after {excerpt(self.text, self.position)}"
                )
            searched = max(searched, len(self.text) - max(map(len, literals)) + 1)
            yield None

    def refuse(self, expected: str) -> MalformedCall:
        """Return the error of a text that is not the expected one."""
        return MalformedCall(f"{expected} was expected, not {excerpt(self.text, self.position)}")


def read_text(source: Source, writer: AnswerWriter, end: StartPattern) -> Reading[bool]:
    """Read text up to the beginning of a call. Return False if there is none up to the end of the text.

    White space is held back until it is clear that no call follows.
    """
    is_whole = writer.is_empty  # an answer without calls keeps its white space
    is_beginning = True
    writer.begin_part()
    while True:
        start = end.find(source.text, source.position)
        is_call = start is not None and start.is_certain
        is_end = source.is_final and not is_call
        stop = len(source.text) if start is None or is_end else start.index
        text = source.text[source.position : stop]
        visible = text if is_end and is_whole else text.rstrip()
        if visible:
            yield writer.write_text(visible.lstrip() if is_beginning and not is_whole else visible)
            is_beginning = False
        source.position += len(visible)
        if is_call or is_end:
            source.position = stop
            return is_call
        yield None
