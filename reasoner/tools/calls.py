"""Calls of Python with which texts end: fenced blocks, and calls in the format of the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from reasoner.tools.fences import CALL_END, find_call, is_in_block
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import CODE, PYTHON, FunctionTool, MalformedCall

PYTHON_FUNCTION = FunctionTool(
    PYTHON,
    "Runs Python code and returns what it prints and the value of its last expression. Variables of earlier calls are "
    "kept; there are no files and no network.",
    {
        "type": "object",
        "properties": {CODE: {"type": "string", "description": "The code to run."}},
        "required": [CODE],
    },
)
"""Python as a function that chat templates declare."""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call with which a text ends."""

    code: str | None
    """The code to run; ``None`` for a faulty call, which runs nothing."""
    fault: str = ""
    """The reason for which a call runs nothing, which is its output."""
    is_own: bool = False
    """True if it is written in the model's own format, in which a call ends the model's turn."""


class CallReader:
    """Finds the calls with which the texts of one model end."""

    def __init__(self, tool_format: ToolFormat | None = None, functions: Sequence[FunctionTool] = ()) -> None:
        """``tool_format``: the model's own, if its calls run. ``functions``: those of the client, which do not."""
        self._format = tool_format
        self.needs_special_tokens = tool_format is not None and bool(tool_format.delimiters)
        """True if special tokens may be a part of calls, so that they have to be in the text."""
        self._functions = (PYTHON_FUNCTION, *functions)
        own = None if tool_format is None else tool_format.call_end
        self.stops = (CALL_END,) if own is None else (CALL_END, own)
        """Stop strings that may end a call."""

    def find(self, text: str, *, ends_turn: bool) -> PythonCall | None:
        """Return the call with which a text ends; ``None`` if it ends with none, or with calls of the client's.

        ``ends_turn``: True if the model has ended its turn, so that a call without a closing delimiter is complete.
        """
        code = find_call(text)
        if code is not None:
            return PythonCall(code)
        return self._find_own(text) if ends_turn or self.ends_own(text) else None

    def ends_own(self, text: str) -> bool:
        """Return True if a text ends with the delimiter that closes the calls of the model's own format."""
        end = None if self._format is None else self._format.call_end
        return end is not None and text.rstrip().endswith(end)

    def is_in_call(self, text: str) -> bool:
        """Return True if a text ends within a block or a call that is not closed yet."""
        end = None if self._format is None else self._format.call_end
        rest = text if end is None else text.rpartition(end)[2]  # DeepSeek's calls have blocks of their own
        return is_in_block(rest) or (self._format is not None and self._format.is_in_call(text))

    def _find_own(self, text: str) -> PythonCall | None:
        if self._format is None or self._format.start.search(text) is None:
            return None
        try:
            calls = self._format.parse(text, self._functions).calls
        except MalformedCall as error:
            return PythonCall(None, str(error), is_own=True)
        names = [call.name for call in calls]
        if PYTHON not in names:
            return None
        if len(names) > 1:
            return PythonCall(None, f"one message calls {PYTHON!r} once, and nothing else", is_own=True)
        arguments = json.loads(calls[0].arguments)
        if arguments.keys() != {CODE} or not isinstance(arguments[CODE], str):
            return PythonCall(None, f"{PYTHON!r} takes one argument, {CODE!r}, which is a text", is_own=True)
        return PythonCall(arguments[CODE], is_own=True)
