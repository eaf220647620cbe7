"""An answer with calls, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reasoner.tools.formats.call import MAX_QUOTED, FunctionTool, MalformedCall, ToolCall


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


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The beginning of a call, with its name, or more of its arguments."""

    index: int
    """Index of the call among the calls of the answer."""
    name: str | None
    arguments: str


Delta = TextDelta | CallDelta


class AnswerWriter:
    """Makes the deltas of an answer, and checks the names of functions."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._num_calls = 0
        self._has_text = False
        self._is_new_part = False

    @property
    def is_empty(self) -> bool:
        """True if the answer has neither text nor calls yet."""
        return not self._has_text and not self._num_calls

    def begin_part(self) -> None:
        """Begin the next text on a line of its own."""
        self._is_new_part = True

    def write_text(self, text: str) -> TextDelta:
        """Return the delta of more text."""
        if self._is_new_part and self._has_text:
            text = "\n" + text
        self._is_new_part, self._has_text = False, True
        return TextDelta(text)

    def begin_call(self, name: str) -> CallDelta:
        """Return the delta of a call's beginning. Raises ``MalformedCall`` if there is no such function."""
        self.find_tool(name)
        self._num_calls += 1
        return CallDelta(self._num_calls - 1, name, "")

    def write_arguments(self, arguments: str) -> CallDelta:
        """Return the delta of more arguments of the call that has begun last."""
        return CallDelta(self._num_calls - 1, None, arguments)

    def find_tool(self, name: str) -> FunctionTool:
        """Return the tool of this name. Raises ``MalformedCall`` that names those there are."""
        if name not in self._tools:
            choices = f"the functions are {', '.join(self._tools)}" if self._tools else "there are no functions"
            raise MalformedCall(f"there is no function {name[:MAX_QUOTED]!r}; {choices}")
        return self._tools[name]


def collect_answer(deltas: Iterable[Delta]) -> ParsedAnswer:
    """Return the answer that the deltas add up to."""
    texts: tuple[list[str], list[str]] = ([], [])
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            texts[bool(names)].append(delta.text)
            continue
        if delta.name is not None:
            names.append(delta.name)
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    calls = tuple(ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    before, after = map("".join, texts)
    return ParsedAnswer(before, calls, after)
