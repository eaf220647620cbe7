"""Reading of a text from its beginning to its end."""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.call import MalformedCall, excerpt

_SPACE = re.compile(r"\s*")


class Source:
    """A text, and the position up to which it is read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        """Return the next character after white space, which alone is read; an empty text at the end."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # it matches an empty text
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def accept(self, *literals: str) -> str | None:
        """Read one of the literals after white space, and return it, or read white space only and return ``None``."""
        self.peek()
        literal = next((literal for literal in literals if self.text.startswith(literal, self.position)), None)
        self.position += len(literal or "")
        return literal

    def expect(self, *literals: str) -> str:
        """Read one of the literals after white space, and return it. Raises ``MalformedCall`` for another text."""
        literal = self.accept(*literals)
        if literal is None:
            raise self.refuse(" or ".join(map(repr, literals)))
        return literal

    def take_until(self, *literals: str) -> tuple[str, str]:
        """Read up to the first of the literals and behind it, and return the text before it, and which one it is.

        Raises ``MalformedCall`` if the text ends before.
        """
        ends = [(self.text.find(literal, self.position), literal) for literal in literals]
        found = [(end, literal) for end, literal in ends if end >= 0]
        if not found:
            names = " or ".join(map(repr, literals))
            raise MalformedCall(f"{names} is missing after {excerpt(self.text, self.position)}")
        end, literal = min(found)
        taken = self.text[self.position : end]
        self.position = end + len(literal)
        return taken, literal

    def refuse(self, expected: str) -> MalformedCall:
        """Return the error of a text that is not the expected one."""
        return MalformedCall(f"{expected} was expected, not {excerpt(self.text, self.position)}")


def read_text(source: Source, writer: AnswerWriter, start: re.Pattern[str]) -> bool:
    """Read text up to the beginning of a call. Return False if there is none up to the end of the text."""
    match = start.search(source.text, source.position)
    stop = len(source.text)
    if match is not None:
        stop = match.end() - len(match.group().lstrip())
    text = source.text[source.position : stop]
    source.position = stop
    if match is None and writer.is_empty and text:
        writer.add_text(text)  # an answer without calls keeps its white space
    elif text.strip():
        writer.add_text(text.rstrip() if writer.is_empty else text.strip())
    return match is not None
