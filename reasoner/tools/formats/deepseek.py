"""DeepSeek's formats: calls between special tokens.

DeepSeek V3 and R1 write a type, the name, and the arguments as a block of Markdown; V3.1 writes only the name and the
arguments. Spaces in the names of the tokens are U+2581, and bars U+FF5C.
"""

from __future__ import annotations

import re

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.json_reading import read_arguments
from reasoner.tools.formats.source import Source

_TOKEN = "<\uff5ctool\u2581{}\uff5c>"
CALLS_BEGIN = _TOKEN.format("calls\u2581begin")
CALLS_END = _TOKEN.format("calls\u2581end")
CALL_BEGIN = _TOKEN.format("call\u2581begin")
CALL_END = _TOKEN.format("call\u2581end")
SEPARATOR = _TOKEN.format("sep")
_TYPE = "function"
_FENCE = "```json"


class DeepSeek(InlineFormat):
    """Formats of DeepSeek V3, V3-0324, V3.1, R1-0528 and R1's distillations."""

    name = "deepseek"
    has_text_arguments = True
    delimiters = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
    call_end = CALL_END
    start = re.compile(re.escape(CALLS_BEGIN))

    def detect(self, template: str) -> bool:
        return CALLS_BEGIN in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> None:
        source.expect(CALLS_BEGIN)
        source.expect(CALL_BEGIN)
        while True:
            _read_call(source, writer)
            following = source.accept(CALL_BEGIN, CALLS_END)
            if following == CALLS_END or (following is None and not source.peek()):
                return  # R1 often ends its answer without the last token
            if following is None:
                raise source.refuse(f"{CALL_BEGIN!r} or {CALLS_END!r}")


def _read_call(source: Source, writer: AnswerWriter) -> None:
    first, _ = source.take_until(SEPARATOR)
    is_block = source.peek() != "{"
    if is_block:
        if first.strip() != _TYPE:
            raise source.refuse(f"a JSON object with the arguments of {first.strip()!r}")
        name, _ = source.take_until("\n")
    else:
        name = first
    writer.find_tool(name.strip())
    if is_block:
        source.expect(_FENCE)
    writer.add_call(name.strip(), read_arguments(source))
    if is_block:
        source.expect("```")
    source.expect(CALL_END)
