"""DeepSeek's formats: calls between special tokens.

DeepSeek V3 and R1 write a type, the name, and the arguments as a block of Markdown; V3.1 writes only the name and the
arguments. Spaces in the names of the tokens are U+2581, and bars U+FF5C.
"""

from __future__ import annotations

from reasoner.tools.formats.answer import AnswerWriter
from reasoner.tools.formats.base import InlineFormat
from reasoner.tools.formats.json_reading import read_arguments
from reasoner.tools.formats.source import Reading, Source, StartPattern, split_literal

_TOKEN = "<\uff5ctool\u2581{}\uff5c>"
CALLS_BEGIN = _TOKEN.format("calls\u2581begin")
CALLS_END = _TOKEN.format("calls\u2581end")
CALL_BEGIN = _TOKEN.format("call\u2581begin")
CALL_END = _TOKEN.format("call\u2581end")
SEPARATOR = _TOKEN.format("sep")
_TYPE = "function"
_FENCE = "```json"


class DeepSeek(InlineFormat):
    """Format of DeepSeek V3, V3-0324, R1-0528 and R1's distillations. Reads that of V3.1 as well."""

    name = "deepseek"
    delimiters = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
    start = StartPattern(split_literal(CALLS_BEGIN))

    def detect(self, template: str) -> bool:
        return CALLS_BEGIN in template and _FENCE in template

    def read_calls(self, source: Source, writer: AnswerWriter) -> Reading[None]:
        yield from source.expect(CALLS_BEGIN)
        yield from source.expect(CALL_BEGIN)
        while True:
            yield from _read_call(source, writer)
            following = yield from source.accept(CALL_BEGIN, CALLS_END)
            if following == CALLS_END or (following is None and not (yield from source.peek())):
                return  # R1 often ends its answer without the last token
            if following is None:
                raise source.refuse(f"{CALL_BEGIN!r} or {CALLS_END!r}")

    def force(self, name: str | None) -> str:
        begin = f"{CALLS_BEGIN}{CALL_BEGIN}{_TYPE}{SEPARATOR}"
        return begin if name is None else f"{begin}{name}\n{_FENCE}\n"


class DeepSeekV31(DeepSeek):
    """Format of DeepSeek V3.1. Reads that of V3 as well."""

    name = "deepseek_v31"

    def detect(self, template: str) -> bool:
        return CALLS_BEGIN in template and _FENCE not in template

    def force(self, name: str | None) -> str:
        begin = CALLS_BEGIN + CALL_BEGIN
        return begin if name is None else f"{begin}{name}{SEPARATOR}"


def _read_call(source: Source, writer: AnswerWriter) -> Reading[None]:
    first, _ = yield from source.take_until(SEPARATOR)
    is_block = (yield from source.peek()) != "{"
    if is_block:
        if first.strip() != _TYPE:
            raise source.refuse(f"a JSON object with the arguments of {first.strip()!r}")
        name, _ = yield from source.take_until("\n")
    else:
        name = first
    yield writer.begin_call(name.strip())
    if is_block:
        yield from source.expect(_FENCE)
    yield from read_arguments(source, writer)
    if is_block:
        yield from source.expect("```")
    yield from source.expect(CALL_END)
