"""Interface of a format of calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from reasoner.tools.formats.answer import AnswerWriter, ParsedAnswer, collect_answer
from reasoner.tools.formats.call import FunctionTool
from reasoner.tools.formats.source import Reading, Source, StartPattern, read_text


class ToolFormat(ABC):
    """A format in which a family of models writes calls. Formats have no state."""

    name: ClassVar[str]
    delimiters: ClassVar[tuple[str, ...]]
    """Special tokens that must stay in the text when it is decoded."""
    start: ClassVar[StartPattern]
    """Pattern of the beginning of calls."""

    @abstractmethod
    def detect(self, template: str) -> bool:
        """Return True if a chat template has the marks of this format."""

    @abstractmethod
    def read(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        """Read a whole answer."""

    @abstractmethod
    def force(self, name: str | None) -> str:
        """Return the text that begins a call of this function, or of any, for an answer that must be a call.

        It ends where a model's own tokens end as well, so it has no white space at its end that a token would include.
        """

    def starts_call(self, text: str) -> int | None:
        """Return the index where the first call begins, or may be beginning if the text goes on."""
        start = self.start.find(text)
        return None if start is None else start.index

    def parse(self, text: str, tools: Sequence[FunctionTool]) -> ParsedAnswer:
        """Return the calls of a finished text. Raises ``MalformedCall`` for one that is broken or cut off."""
        reading = self.read(Source(text, is_final=True), AnswerWriter(tools))
        return collect_answer(delta for delta in reading if delta is not None)


class InlineFormat(ToolFormat):
    """A format whose calls stand in the text of the answer."""

    def read(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        while (yield from read_text(source, writer, self.start)):
            yield from self.read_calls(source, writer)

    @abstractmethod
    def read_calls(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        """Read the calls that begin at the position."""
