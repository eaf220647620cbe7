r"""Hermes' format, which Qwen2.5 and Qwen3 also use: JSON objects between tags.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Hermes 2 Pro writes the arguments before the name.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import CallFrame, InlineFormat
from reasoner.tools.formats.json_reading import read_call_object
from reasoner.tools.formats.source import Source

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
_MARKS_OF_OTHERS = ("<function=", "<arg_key>")
"""Marks of Qwen3-Coder and GLM, which write other texts between the same tags."""


class Hermes(InlineFormat):
    """Format of Hermes, Qwen2.5, QwQ and Qwen3."""

    name = "hermes"
    delimiters = (OPENING, CLOSING)
    call_end = CLOSING
    frame = CallFrame(f'{OPENING}\n{{"name": NAME, "arguments": ', f"}}\n{CLOSING}", "\n")
    start = re.compile(re.escape(OPENING))

    def detect(self, template: str) -> bool:
        is_other = any(mark in template for mark in _MARKS_OF_OTHERS)
        return OPENING in template and "arguments" in template and not is_other

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        source.expect(OPENING)
        read_call_object(source, writer, "arguments")
        source.expect(CLOSING)
