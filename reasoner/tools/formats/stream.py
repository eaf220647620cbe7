"""Calls of a text that is still being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reasoner.tools.formats.answer import AnswerWriter, Delta, ParsedAnswer, collect_answer
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import FunctionTool, MalformedCall
from reasoner.tools.formats.source import Source


class CallStream:
    """Turns the pieces of a text into deltas as soon as their meaning is certain.

    The deltas add up to what ``ToolFormat.parse`` returns for the whole text. Text that may be the beginning of a call
    is held back. A malformed call is raised where it is read, after the deltas before it.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[FunctionTool]) -> None:
        self._source = Source()
        self._reading = tool_format.read(self._source, AnswerWriter(tools))
        self._deltas: list[Delta] = []
        self._error: MalformedCall | None = None
        self._is_read = False

    def feed(self, piece: str) -> Iterator[Delta]:
        """Add a piece of text, and return the deltas that are certain now, which are read as they are iterated.

        The iterator raises ``MalformedCall``.
        """
        self._source.text += piece
        return self._advance()

    def finish(self) -> Iterator[Delta]:
        """End the text, and return the remaining deltas like ``feed``."""
        self._source.is_final = True
        return self._advance()

    @property
    def answer(self) -> ParsedAnswer:
        """The answer, after all deltas are read. Raises the ``MalformedCall`` of a broken one."""
        if self._error is not None:
            raise self._error
        if not self._is_read:
            raise RuntimeError("finish the stream, and read its deltas, before its answer")
        return collect_answer(self._deltas)

    def _advance(self) -> Iterator[Delta]:
        if self._error is not None:
            raise self._error
        try:
            for delta in self._reading:
                if delta is None:
                    return
                self._deltas.append(delta)
                yield delta
        except MalformedCall as error:
            self._error = error
            raise
        self._is_read = True
