"""An answer with calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from reasoner.tools.formats.call import CODE, MAX_QUOTED, PYTHON, FunctionTool, MalformedCall, ToolCall


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A text divided into its calls and the rest. White space next to calls belongs to neither."""

    text_before: str
    """The text before the first call."""
    calls: tuple[ToolCall, ...]
    text_after: str = ""
    """The text between and after the calls, each part on lines of its own."""

    @property
    def text(self) -> str:
        """The text without the calls."""
        return self.text_before + self.text_after


class AnswerWriter:
    """Collects the texts and calls of an answer in their order, and checks the names of functions."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._calls: list[ToolCall] = []
        self._before: list[str] = []
        self._after: list[str] = []

    @property
    def is_empty(self) -> bool:
        """True if the answer has neither text nor calls yet."""
        return not self._before and not self._calls

    @property
    def answer(self) -> ParsedAnswer:
        """All that was added."""
        after = "".join(f"\n{text}" for text in self._after)
        return ParsedAnswer("\n".join(self._before), tuple(self._calls), after if self._before else after[1:])

    def add_text(self, text: str) -> None:
        """Add a text, on lines of its own."""
        (self._after if self._calls else self._before).append(text)

    def add_call(self, name: str, arguments: str) -> None:
        """Add a call. Raises ``MalformedCall`` if there is no such function."""
        self.find_tool(name)
        self._calls.append(ToolCall(name, arguments))

    @property
    def has_python(self) -> bool:
        """True if one of the functions runs Python, which some formats also write as bare code."""
        return PYTHON in self._tools

    def add_code(self, code: str) -> None:
        """Add a call of Python that is written as bare code. Raises ``MalformedCall`` if there is no such function."""
        self.add_call(PYTHON, json.dumps({CODE: code}))

    def find_tool(self, name: str) -> FunctionTool:
        """Return the tool of this name. Raises ``MalformedCall`` that names those there are."""
        if name not in self._tools:
            choices = f"the functions are {', '.join(self._tools)}" if self._tools else "there are no functions"
            raise MalformedCall(f"there is no function {name[:MAX_QUOTED]!r}; {choices}")
        return self._tools[name]
