"""Interface of a format of calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from reasoner.tools.formats.answer import AnswerWriter, ParsedAnswer
from reasoner.tools.formats.call import FunctionTool, MalformedCall
from reasoner.tools.formats.source import Source, read_text

_MIN_PARTIAL_CHARS = 4
"""Length from which the end of a text that was cut off may be the beginning of a delimiter."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The texts around the arguments of a call, which are JSON, for calls that an engine is made to write."""

    begin: str
    """The text before the arguments, in which ``NAME`` stands for the function's name as a JSON string."""
    end: str
    separator: str
    """The text between two calls."""
    arguments_field: str | None = None
    """The field of the arguments, if a whole call is a JSON object."""


class ToolFormat(ABC):
    """A format in which a family of models writes calls. Formats have no state."""

    name: ClassVar[str]
    delimiters: ClassVar[tuple[str, ...]]
    """Special tokens that must stay in the text when it is decoded."""
    start: ClassVar[re.Pattern[str]]
    """Pattern of the beginning of calls."""
    call_end: ClassVar[str | None] = None
    """The text that ends each call; ``None`` if only the end of the model's turn shows that a call is complete."""
    frame: ClassVar[CallFrame | None] = None
    """Texts around arguments; ``None`` for calls that no engine can be made to write."""
    has_channels: ClassVar[bool] = False
    """True if thoughts, calls and answers are messages of their own, which the format tells apart itself."""
    has_text_arguments: ClassVar[bool] = False
    """True if its chat templates read the arguments of earlier calls as text."""

    @abstractmethod
    def detect(self, template: str) -> bool:
        """Return True if a chat template has the marks of this format."""

    @abstractmethod
    def read(self, source: Source, writer: AnswerWriter) -> None:
        """Read a whole answer."""

    def is_in_call(self, text: str) -> bool:
        """Return True if a text ends within a call."""
        last = next(iter(deque(self.start.finditer(text), maxlen=1)), None)
        return last is not None and (self.call_end is None or self.call_end not in text[last.start() :])

    def parse(self, text: str, tools: Sequence[FunctionTool]) -> ParsedAnswer:
        """Return the calls of a finished text. Raises ``MalformedCall`` for one that is broken or cut off."""
        writer = AnswerWriter(tools)
        self.read(Source(text), writer)
        return writer.answer

    def read_cut_words(self, text: str, tools: Sequence[FunctionTool], *, must_call: bool) -> str:
        """Return the words of a text that was cut off, without its calls and without the beginning of one.

        ``must_call``: the engine may have been held to a call from the first token on.
        """
        writer = AnswerWriter(tools)
        with suppress(MalformedCall):
            self.read(Source(text), writer)
        words = writer.answer.text.strip()
        head = "" if self.frame is None else self.frame.begin.partition("NAME")[0]
        if must_call and head and (words.startswith(head.rstrip()) or head.startswith(words)):
            return ""
        for delimiter in self.delimiters:
            for length in range(len(delimiter) - 1, _MIN_PARTIAL_CHARS - 1, -1):
                if words.endswith(delimiter[:length]):
                    return words[:-length].rstrip()
        return words


class InlineFormat(ToolFormat):
    """A format whose calls stand in the text of the answer."""

    def read(self, source: Source, writer: AnswerWriter) -> None:
        while read_text(source, writer, self.start):
            self.read_calls(source, writer)

    @abstractmethod
    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        """Read the calls that begin at the position."""
